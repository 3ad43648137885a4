// bwd_sm90.cuh: what the Hopper kernels of the backward share, in which a block of keys stays and blocks of rows pass by: the walk, the
// warpgroup that copies, and the steps between the products.
#pragma once

#include "gradient.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace cupyflash {

struct TensorMaps {
  TensorMap q, k, v, dout;  // 4-D: column, row, head, batch
};

// A block of keys, and which part of the row blocks that pass by it. parts = 0: there are no more.
template <class C>
struct KeyShare : KeyWork<C> {
  int part = 0, parts = 1, split = 0;  // split: the number of its tile among those in parts
  __device__ explicit KeyShare(const KeyWork<C>& w) : KeyWork<C>(w) {}
};

// The row blocks that pass by a block of keys: of each query head that reads it, from the first that sees it on. (Starts spread over all
// rows, so that blocks do not add to the same sums of dQ at a time, made no difference: 0.5 % slower.)
template <class C>
struct RowBlocks {
  int h, i, left;
  __device__ RowBlocks(const ForwardParams& f, const KeyShare<C>& w) {
    const int group = f.num_heads_q / f.num_heads_kv;
    h = w.h_kv * group;
    i = w.row_first;
    left = group * (w.row_last - w.row_first);
    if constexpr (C::kSplits) {
      if (w.parts > 1) {
        const int all = left, before = all * w.part / w.parts;  // at least one of each part: plan._splits
        left = all * (w.part + 1) / w.parts - before;
        h += before / (w.row_last - w.row_first);
        i += before % (w.row_last - w.row_first);
      }
    }
  }
  __device__ void next(const KeyShare<C>& w) {
    --left;
    if (++i == w.row_last) {
      i = w.row_first;
      ++h;
    }
  }
};

// The order of the tiles: blocks of keys of a head. Those of the heads of a section come in the order of their length, falling in the last
// section, which so ends with short ones, rising in the one before it, and so on: from a simulation the largest load is 1.00-1.05 times the
// mean under a causal mask, 1.03-1.07 where each head falls.
template <class C>
struct KeyTiles {
  int key_blocks, heads, section, split_tiles, split_parts;

  __device__ explicit KeyTiles(const BackwardParams& p) {
    const ForwardParams& f = p.forward;
    split_tiles = C::kSplits ? static_cast<int>(p.split_tiles) : 0;
    split_parts = C::kSplits ? static_cast<int>(p.split_parts) : 1;
    key_blocks = (f.seqlen_k + C::kBlockN - 1) / C::kBlockN;
    heads = f.batch * f.num_heads_kv;
    section = f.section;
  }

  __device__ long long count() const { return static_cast<long long>(key_blocks) * heads + split_tiles * (split_parts - 1); }
  __device__ int find(int tile) const { return tile; }

  __device__ KeyShare<C> work(const ForwardParams& f, int item) const {
    const int whole = key_blocks * heads - split_tiles;
    const bool splits = C::kSplits && item >= whole;
    const int split = splits ? (item - whole) / split_parts : 0, tile = splits ? whole + split : item;
    const int n = tile / (section * key_blocks), inside = tile % (section * key_blocks);
    const int wide = min(section, heads - n * section);
    int key_block = inside / wide;
    if ((heads - 1) / section % 2 != n % 2) key_block = key_blocks - 1 - key_block;
    KeyShare<C> share(KeyWork<C>(f, n * section + inside % wide, key_block));
    if (splits) {
      share.part = (item - whole) % split_parts;
      share.parts = split_parts;
      share.split = split;
    }
    return share;
  }
};

// The same for packed sequences, whose tiles are listed (packed_tiles.cu).
template <class C>
struct ListedKeyTiles {
  const TileList* list;

  __device__ explicit ListedKeyTiles(const BackwardParams& p) : list(static_cast<const TileList*>(p.forward.key_tiles)) {}
  __device__ long long count() const { return list->count; }
  __device__ ListedTile find(int tile) const { return list->tiles[tile]; }
  static __device__ KeyShare<C> work(const ForwardParams& f, const ListedTile& tile) {
    return KeyShare<C>(KeyWork<C>(f, tile.b(f.num_heads_kv), tile.h(f.num_heads_kv), tile.first / C::kBlockN, tile.sequence(f)));
  }
};
template <class C>
using KeyTilesOf = typename Choice<C::kPacked, ListedKeyTiles<C>, KeyTiles<C>>::Type;

// Whose keys lie in each buffer, known before they are there. The thread that has them copied works it out for all: where each warp divided
// for itself, a causal backward at D = 64, S = 1024 took 2.5 % longer.
template <class C>
struct TilesInTurn {
  unsigned long long full[C::kKeyBuffers];
  KeyShare<C> tile[C::kKeyBuffers];
};

// What copies need where a tile may hold rows of the next sequence: zeros take their place, since 0 x NaN is NaN. Rows of Q and dO that
// arrive so are announced to `raw`, and by the warp of the vectors, when it has written the zeros, to those who wait for them.
template <int kStages, bool kPacked>
struct RawBarriers {
  unsigned long long raw[kStages];
};
template <int kStages>
struct RawBarriers<kStages, false> {};

// Whether a block of rows ends inside one that is loaded.
template <class C>
__device__ inline bool has_tail(const KeyWork<C>& w, int i) {
  return C::kPacked && w.s.used_q < (i + 1) * C::kBlockM;
}

// Rows from `first` on become zeros. Scope: kThreads threads, of which this is number `thread`.
template <class T, int kRows, int kThreads>
__device__ inline void zero_rows(char* tile, int first, int thread) {
  const int chunks = (kRows - first) * 8;
  for (int n = thread; n < chunks * T::kCount; n += kThreads) {
    *reinterpret_cast<float4*>(tile + n / chunks * T::kPanelBytes + first * 128 + n % chunks * 16) = float4{0, 0, 0, 0};
  }
}

// Scope: the two warpgroups that multiply. Keys that nobody uses become zeros; the keys have arrived.
template <class C, class M>
__device__ inline void zero_keys(M& smem, const KeyWork<C>& w, int buffer, int barrier) {
  const int used = w.s.used_k - w.key;
  if (!C::kPacked || used >= C::kBlockN) return;
  zero_rows<typename M::TileK, C::kBlockN, 256>(smem.k[buffer], max(used, 0), threadIdx.x - 128);
  zero_rows<typename M::TileV, C::kBlockN, 256>(smem.v[buffer], max(used, 0), threadIdx.x - 128);
  fence_async_proxy();
  named_barrier_sync(barrier, 256);
}

// Scope: block. Before the first use of smem; nobody has arrived at any of its barriers.
template <class C, class M>
__device__ inline void begin(const TensorMaps& maps, M& smem) {
  if (threadIdx.x == 0) {
    prefetch_map(&maps.q);
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
    prefetch_map(&maps.dout);
  }
  if (threadIdx.x == 128) {
    for (int n = 0; n < C::kKeyBuffers; ++n) {
      mbarrier_init(smem_address(&smem.keys_full[n]), 1);
      mbarrier_init(smem_address(&smem.keys_empty[n]), 8 + 1);  // the warps that multiply and that of the vectors
    }
    for (int n = 0; n < C::kStages; ++n) {
      mbarrier_init(smem_address(&smem.q_full[n]), 1 + 32);  // the thread of the tiles and the warp of the vectors
      mbarrier_init(smem_address(&smem.dout_full[n]), 1);
      mbarrier_init(smem_address(&smem.q_empty[n]), 8);
      mbarrier_init(smem_address(&smem.dout_empty[n]), 8);
      if constexpr (C::kPacked) mbarrier_init(smem_address(&smem.tails.raw[n]), 2);  // Q and dO
    }
    for (auto& full : smem.tiles.full) mbarrier_init(smem_address(&full), 1);
    if constexpr (C::kBlockN == 128) {
      for (int g = 0; g < 2; ++g) {
        mbarrier_init(smem_address(&smem.dq_full[g]), 4);  // the warps of a warpgroup
        mbarrier_init(smem_address(&smem.dq_empty[g]), 1);
      }
    }
    mbarrier_init_fence();
  }
  __syncthreads();
}

// Scope: one thread. Queues K and V of the block of keys.
template <class C, class M>
__device__ inline void load_keys(const TensorMaps& maps, M& smem, const KeyWork<C>& w, int buffer) {
  unsigned long long& full = smem.keys_full[buffer];
  mbarrier_arrive_expect(smem_address(&full), M::TileK::kBytes + M::TileV::kBytes);
  const int key = static_cast<int>(keys_before<C>(w.s)) + w.key, batch = C::kPacked ? 0 : w.b;
  load_panels<typename M::TileK>(smem.k[buffer], maps.k, full, key, w.h_kv, batch);
  load_panels<typename M::TileV>(smem.v[buffer], maps.v, full, key, w.h_kv, batch);
}

// Scope: one thread. Queues Q and dO of all row blocks that pass by; n counts row blocks since the kernel began.
template <class C, class M>
__device__ inline void load_rows(const ForwardParams& f, const TensorMaps& maps, M& smem, const KeyShare<C>& w, int& n) {
  for (RowBlocks<C> rows(f, w); rows.left > 0; ++n, rows.next(w)) {
    const int stage = n % C::kStages, parity = n / C::kStages % 2 ^ 1;
    const int row = static_cast<int>(rows_before<C>(w.s)) + rows.i * C::kBlockM, batch = C::kPacked ? 0 : w.b;
    unsigned long long *q_full = &smem.q_full[stage], *dout_full = &smem.dout_full[stage];
    mbarrier_wait(smem_address(&smem.q_empty[stage]), parity);
    if constexpr (C::kPacked) {
      if (has_tail(w, rows.i)) {
        mbarrier_arrive(smem_address(q_full));
        q_full = dout_full = &smem.tails.raw[stage];
      }
    }
    load_tile_of<typename M::TileQ>(smem.q[stage], maps.q, *q_full, row, rows.h, batch);
    mbarrier_wait(smem_address(&smem.dout_empty[stage]), parity);
    load_tile_of<typename M::TileO>(smem.dout[stage], maps.dout, *dout_full, row, rows.h, batch);
  }
}

// Scope: warp. Copies LSE and delta of the same; `phases` has a bit for each of the barriers of tiles that hold rows of the next sequence.
template <class C, class M>
__device__ inline void copy_vectors(const BackwardParams& p, M& smem, const KeyShare<C>& w, int& n, unsigned& phases) {
  const ForwardParams& f = p.forward;
  for (RowBlocks<C> rows(f, w); rows.left > 0; ++n, rows.next(w)) {
    const int stage = n % C::kStages, parity = n / C::kStages % 2 ^ 1;
    const long long first = first_in_vector<C>(f, w.s, w.b, rows.h) + rows.i * C::kBlockM;
    const int count = w.s.used_q - rows.i * C::kBlockM;
    mbarrier_wait(smem_address(&smem.q_empty[stage]), parity);
#pragma unroll
    for (int r = threadIdx.x % 32; r < C::kBlockM; r += 32) {
      smem.reference[stage][r] = r < count ? p.row_reference[first + r] : infinity(0.0f);
      smem.delta[stage][r] = r < count ? static_cast<const float*>(p.row_delta)[first + r] : 0.0f;
    }
    if constexpr (C::kPacked) {
      if (has_tail(w, rows.i)) {
        mbarrier_wait(smem_address(&smem.tails.raw[stage]), phases >> stage & 1);
        phases ^= 1u << stage;
        zero_rows<typename M::TileQ, C::kBlockM, 32>(smem.q[stage], max(count, 0), threadIdx.x % 32);
        zero_rows<typename M::TileO, C::kBlockM, 32>(smem.dout[stage], max(count, 0), threadIdx.x % 32);
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&smem.dout_full[stage]));
      }
    }
    mbarrier_arrive(smem_address(&smem.q_full[stage]));
  }
}

// Scope: one thread. Queues the copies of tile after tile, as they are given out.
template <class C, class M>
__device__ inline void copy_tiles(const BackwardParams& p, const TensorMaps& maps, M& smem) {
  const KeyTilesOf<C> tiles(p);
  int tile = blockIdx.x, n = 0;
  for (int t = 0;; ++t) {
    const int buffer = t % C::kKeyBuffers, parity = t / C::kKeyBuffers % 2 ^ 1;
    if (tile >= tiles.count()) {
      mbarrier_wait(smem_address(&smem.keys_empty[buffer]), parity);
      smem.tiles.tile[buffer].parts = 0;
      return mbarrier_arrive(smem_address(&smem.tiles.full[buffer]));
    }
    const KeyShare<C> found = tiles.work(p.forward, tiles.find(tile));
    mbarrier_wait(smem_address(&smem.keys_empty[buffer]), parity);
    load_keys<C>(maps, smem, found, buffer);
    const KeyShare<C>& w = smem.tiles.tile[buffer] = found;  // from there this thread reads it, too: it has 24 registers
    mbarrier_arrive(smem_address(&smem.tiles.full[buffer]));
    load_rows<C>(p.forward, maps, smem, w, n);
    // Not before: of tiles given out while the one before them runs, the last of a causal call end up to 3 % later (simulated). kStages row
    // blocks are still to be multiplied, longer than the answer takes.
    tile = gridDim.x + atomicAdd(p.next_tile, 1);
  }
}

// Scope: warp. Copies the vectors of the same.
template <class C, class M>
__device__ inline void copy_vectors_of_tiles(const BackwardParams& p, M& smem) {
  int n = 0;
  unsigned phases = 0;
  for (int t = 0;; ++t) {
    const int buffer = t % C::kKeyBuffers;
    mbarrier_wait(smem_address(&smem.tiles.full[buffer]), t / C::kKeyBuffers % 2);
    const KeyShare<C>& w = smem.tiles.tile[buffer];
    if (w.parts == 0) return;
    copy_vectors<C>(p, smem, w, n, phases);
    __syncwarp();
    release(smem.keys_empty[buffer]);
  }
}

// Scope: the warpgroups that multiply. The tile whose keys are in a buffer, when they are there.
template <class C, class M>
__device__ inline KeyShare<C> next_tile(M& smem, int buffer, int parity, int barrier) {
  mbarrier_wait(smem_address(&smem.tiles.full[buffer]), parity);
  KeyShare<C> w = smem.tiles.tile[buffer];
  w.parts = uniform(w.parts);
  if (w.parts == 0) return w;
  w.b = uniform(w.b);
  w.h_kv = uniform(w.h_kv);
  w.key = uniform(w.key);
  w.s.used_q = uniform(w.s.used_q);
  w.s.used_k = uniform(w.s.used_k);
  w.s.offset = uniform(w.s.offset);
  w.row_first = uniform(w.row_first);
  w.row_last = uniform(w.row_last);
  w.full_first = uniform(w.full_first);
  w.full_last = uniform(w.full_last);
  if constexpr (C::kSplits) {
    w.part = uniform(w.part);
    w.split = uniform(w.split);
  }
  if constexpr (C::kPacked) {
    w.s.first_q = uniform(w.s.first_q);
    w.s.first_k = uniform(w.s.first_k);
    w.s.len_q = uniform(w.s.len_q);
    w.s.len_k = uniform(w.s.len_k);
  }
  mbarrier_wait(smem_address(&smem.keys_full[buffer]), parity);
  zero_keys<C>(smem, w, buffer, barrier);
  return w;
}

// dK and dV of a tile that is split: each thread of the two warpgroups that multiply leaves what it has of them, and the block that comes
// last adds up all parts, in their order.
template <class C>
struct PartSums {
  static constexpr int kOfThread = (C::kHeadDim + C::kHeadDimV) / 8;  // four neighbouring accumulators each
  float* g;
  int parts;

  __device__ PartSums(const BackwardParams& p, const KeyShare<C>& w)
      : g(p.part_sums + (static_cast<long long>(w.split) * w.parts * kOfThread * 256 + threadIdx.x - 128) * 4), parts(w.parts) {}
  __device__ float* at(int part, int n) const { return g + (part * kOfThread + n) * (256 * 4); }
  template <int kTiles>
  __device__ void leave(const float (&r)[kTiles][4], int part, int first) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) *reinterpret_cast<float4*>(at(part, first + n)) = float4{r[n][0], r[n][1], r[n][2], r[n][3]};
  }
  template <int kTiles>
  __device__ void sum(float (&r)[kTiles][4], int first) const {
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float of_part[4];
        global_load_l2_4(of_part, at(part, first + n));
#pragma unroll
        for (int e = 0; e < 4; ++e) r[n][e] = part == 0 ? of_part[e] : r[n][e] + of_part[e];
      }
    }
  }
};
// Scope: the two warpgroups, which have left their part. Whether all others have; `came` is in shared memory.
template <class C>
__device__ inline bool comes_last(const BackwardParams& p, const KeyShare<C>& w, int barrier, int& came) {
  named_barrier_sync(barrier, 256);
  if (threadIdx.x == 128) came = count_up(p.next_tile + 1 + w.split);
  named_barrier_sync(barrier, 256);
  return uniform(came) == w.parts - 1;
}

// Two neighbouring query rows' numbers for each 8 of them, as the lanes have the columns of S^T.
template <class C>
struct ColumnVector {
  float2 r[C::kBlockM / 8];
  __device__ explicit ColumnVector(const float* vector) {
#pragma unroll
    for (int n = 0; n < C::kBlockM / 8; ++n) r[n] = *reinterpret_cast<const float2*>(vector + 8 * n + threadIdx.x % 4 * 2);
  }
};

// S^T becomes P^T: rows are keys, from `key` on, columns query rows, from `row` on.
template <class C, bool kMasked>
__device__ inline void weights_step(const ForwardParams& f, const Sequence& s, int key, int row, float (&rS)[1][C::kBlockM / 8][4],
                                    const ColumnVector<C>& reference) {
  const int lane = threadIdx.x % 32;
  const float scale_log2 = f.softmax_scale_log2;
  RowRange seen[2];  // the rows that see the lane's two keys
  if constexpr (kMasked) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = key + lane / 4 + 8 * r;
      seen[r] = visible_rows<C>(f, s, j, j + 1);
      if (j >= s.used_k) seen[r].last = 0;
      seen[r].first -= row + 2 * (lane % 4);
      seen[r].last -= row + 2 * (lane % 4);
    }
  }
#pragma unroll
  for (int n = 0; n < C::kBlockM / 8; ++n) {
    const float2 of = reference.r[n];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * n + e % 2;
      const float weight = ex2(fmaf(rS[0][n][e], scale_log2, e % 2 ? -of.y : -of.x));
      const bool visible = !kMasked || (column >= seen[e / 2].first && column < seen[e / 2].last);
      rS[0][n][e] = visible ? weight : 0.0f;
    }
  }
}

// The accumulators of a 64 x 8 kTiles product as the left operand of the next.
template <class Element, int kTiles>
__device__ inline void pack_left(unsigned (&packed)[kTiles / 2][4], const float (&r)[1][kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles / 2; ++n) {
    packed[n][0] = pack(r[0][2 * n][0], r[0][2 * n][1], Element{});
    packed[n][1] = pack(r[0][2 * n][2], r[0][2 * n][3], Element{});
    packed[n][2] = pack(r[0][2 * n + 1][0], r[0][2 * n + 1][1], Element{});
    packed[n][3] = pack(r[0][2 * n + 1][2], r[0][2 * n + 1][3], Element{});
  }
}

// What each kernel has of its own: its shared memory, and what its warpgroups do.
template <class C>
struct Smem;
template <class C>
__device__ inline void produce(const BackwardParams& p, const TensorMaps& maps, Smem<C>& smem);
template <class C>
__device__ inline void consume(const BackwardParams& p, Smem<C>& smem);

// Scope: block.
template <class C>
__device__ inline void backward(const BackwardParams& p, const TensorMaps& maps, Smem<C>& smem) {
  begin<C>(maps, smem);
  if (threadIdx.x < 128) {
    registers_give<24>();
    produce<C>(p, maps, smem);
  } else {
    registers_take<240>();
    consume<C>(p, smem);
  }
}

}  // namespace cupyflash
