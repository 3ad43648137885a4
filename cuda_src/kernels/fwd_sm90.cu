// fwd_sm90.cu: attention forward by the tensor memory accelerator and wgmma, for fp16 and bf16 on sm_90a. Read it after fwd_sm80.cu.
//
// Algorithm  FlashAttention-3 (arXiv 2407.08608): the softmax of key block j runs while P V of the block before it is multiplied.
// Work       A tile is kBlockM rows of one head. Where first rows see few keys (causal, windows), rows are counted from the last one up, so
//            that a tile of fewer rows is the shortest one, not the longest: with 192 rows of 1024 that is one tile of six. There is a
//            block for each SM, which takes every gridDim-th tile, there and back; of packed sequences, whose tiles are listed
//            (packed_tiles.cu), the next one that none has taken.
// Walk       From the last visible key block down to the first.
// Threads    Warpgroup 0 copies: one thread queues all loads, and decides what is next, which of packed sequences another one does. The
//            other warpgroups have 64 rows of S and O each, in registers, and do what they find in shared memory; of the key blocks of the
//            tile each passes over those it does not see.
// Smem       kStagesQ tiles of Q, each with its Work, then kStages tiles of K and of V; a barrier that says "full" and one that says
//            "empty" for each.
// Pages      Of a cache (kPaged): a block of keys is copied page by page, into the places that it has without pages.
// Way out    As fwd_sm80: a row that left the range is computed again by attend_row.
#include "../primitives/softmax.cuh"
#include "../primitives/tma.cuh"
#include "../primitives/wgmma.cuh"

namespace cupyflash {

constexpr int kNone = -2147483647;

// Where first rows see few keys.
template <class C>
constexpr bool kFromLast = C::kCausal || C::kLocal;

struct TensorMaps {
  TensorMap q, k, v, out;  // 4-D: column, row, head, batch
};

template <class C>
struct Smem {
  using TileQ = Panels<C::kBlockM, C::kHeadDim>;
  using TileK = Panels<C::kBlockN, C::kHeadDim>;
  using TileV = Panels<C::kBlockN, C::kHeadDimV>;
  using TileO = Panels<8, C::kHeadDimV>;
  alignas(1024) char q[C::kStagesQ][TileQ::kBytes];
  alignas(1024) char k[C::kStages][TileK::kBytes];
  alignas(1024) char v[C::kStages][TileV::kBytes];
  alignas(1024) char o[C::kOwnOut ? C::kBlockM / 16 : 1][C::kOwnOut ? TileO::kBytes : 1024];  // of a warp
  alignas(8) unsigned long long q_full[C::kStagesQ], q_empty[C::kStagesQ];
  unsigned long long k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
  // Of this tile and the next in turn, its keys those that are copied; row kNone: there is no more. One more where another thread finds
  // them.
  static constexpr int kWorks = C::kPacked ? 3 : 2;
  unsigned long long work_full[C::kPacked ? kWorks : 1], work_wanted;
  Work<C> work[kWorks];
};

// Where tensor maps have a tile: packed sequences are one batch.
template <class C>
__device__ inline int batch_of(const Work<C>& w) {
  return C::kPacked ? 0 : w.b;
}

// Blocks of keys that other warpgroups multiply: waited for and released.
template <class C>
__device__ inline void skip(Smem<C>& smem, Ring<C::kStages>& k, int count) {
  for (; count > 0; --count) {
    mbarrier_wait(smem_address(&smem.k_full[k.stage()]), k.parity());
    release(smem.k_empty[k.stage()]);
    mbarrier_wait(smem_address(&smem.v_full[k.stage()]), k.parity());
    release(smem.v_empty[k.stage()]);
    ++k.used;
  }
}

// The tiles of one block in turn.
template <class C>
struct Tiles {
  int row_blocks, heads, section, first_row, pass = 0;

  __device__ explicit Tiles(const ForwardParams& p) {
    row_blocks = (p.seqlen_q + C::kBlockM - 1) / C::kBlockM;
    heads = p.batch * p.num_heads_q;
    section = p.section;
    first_row = kFromLast<C> ? p.seqlen_q - row_blocks * C::kBlockM : 0;
  }

  // The next tile, or -1.
  __device__ int next() {
    const int grid = gridDim.x, place = pass % 2 ? grid - 1 - blockIdx.x : blockIdx.x;
    const long long tile = static_cast<long long>(pass++) * grid + place;
    return tile < static_cast<long long>(row_blocks) * heads ? static_cast<int>(tile) : -1;
  }

  // Row blocks of all heads of a section come in the order of their length: falling in the last section, which so ends with short ones,
  // rising in the one before it, and so on. Where lengths change steadily, there and back gives each block the same sum of them; plan.py
  // chooses a section for which the sums come out about equal.
  __device__ Work<C> work(const ForwardParams& p, int tile) const {
    const int n = tile / (section * row_blocks), inside = tile % (section * row_blocks);
    const int wide = min(section, heads - n * section);
    int row_block = inside / wide;
    if ((heads - 1) / section % 2 == n % 2) row_block = row_blocks - 1 - row_block;
    Work<C> w(p, n * section + inside % wide, first_row + row_block * C::kBlockM);
    if (w.keys.empty()) w.keys = {0, 1, 0, 0};
    return w;
  }
};

// Scope: one thread. Of packed sequences: finds each tile while the last blocks of the one before it are copied. Not sooner: tiles given
// out three ahead, as they once were, made equal sequences of 1k to 4k tokens take 5 to 9 % longer. The thread that copies could do it
// between two tiles in the same time, but has no registers for it: it then spilled up to 36 bytes.
template <class C>
__device__ inline void look_up(const ForwardParams& p, Smem<C>& smem) {
  static_assert(C::kStagesQ == 1 || !C::kOwnOut, "Q is released when nobody needs what is known of the tile before");
  auto* const list = static_cast<TileList*>(p.row_tiles);
  Ring<Smem<C>::kWorks> works;
  const int count = list->count;
  ListedTile listed = list->tiles[blockIdx.x];  // without knowing whether there is one: for both the wait is the same
  for (int tile = blockIdx.x;; ++works.used) {
    Work<C>& w = smem.work[works.stage()];
    const bool more = tile < count;
    if (more) {
      w = Work<C>(p, listed.b(p.num_heads_q), listed.h(p.num_heads_q), listed.first, listed.sequence(p));
      if (w.keys.empty()) w.keys = {0, 1, 0, 0};
    } else {
      w.row = kNone;
    }
    mbarrier_arrive(smem_address(&smem.work_full[works.stage()]));
    if (!more) return;
    mbarrier_wait(smem_address(&smem.work_wanted), works.used % 2);
    tile = gridDim.x + atomicAdd(&list->taken, 1);
    if (tile < count) listed = list->tiles[tile];
  }
}

// How many boxes a block of keys in pages is copied in: a box has the rows that lie together both in a page and in a block, and those
// without keys are left out, since nobody knows what the table has past them.
template <class C>
__device__ inline int num_boxes(const Work<C>& w, int j) {
  return (min(w.s.used_k - j * C::kBlockN, C::kBlockN) + C::kPageRows - 1) / C::kPageRows;
}
// Scope: warp. Each lane the page of one box, as the table has it: asked for a block ahead, for the table is 700 cycles away and the
// products of a block take 2000. Of keys that are not in pages nothing.
template <class C>
__device__ inline int look_up_pages(const ForwardParams& p, const Work<C>& w, int j) {
  if constexpr (C::kPaged) {
    const int lane = threadIdx.x % 32;
    if (j >= w.keys.first && lane < num_boxes<C>(w, j)) return page_of(p, w.b, j * C::kBlockN + lane * C::kPageRows);
  }
  return 0;
}

// Scope: one thread; of keys in pages a warp. Queues the copy of a block of the keys of a sequence, or of their values, into the next
// buffer; `page` is what look_up_pages found.
template <class C, class T>
__device__ inline void load_keys(const ForwardParams& p, const Work<C>& w, Ring<C::kStages>& ring,
                                 const char (&tiles)[C::kStages][T::kBytes], const TensorMap& map, unsigned long long (&full)[C::kStages],
                                 unsigned long long (&empty)[C::kStages], int j, int page, int keys_before, int head, int batch) {
  if constexpr (C::kPaged) {
    constexpr int kRows = C::kPageRows;
    const int lane = threadIdx.x % 32, first = j * C::kBlockN, boxes = num_boxes<C>(w, j);
    mbarrier_wait(smem_address(&empty[ring.stage()]), ring.parity() ^ 1);
    if (lane == 0) mbarrier_arrive_expect(smem_address(&full[ring.stage()]), boxes * (T::kCount * kRows * 128));
    __syncwarp();
#pragma unroll 1
    for (int n = 0; n < boxes; ++n) {
      const int page_of_box = clamp(__shfl_sync(kWarp, page, n), 0, p.num_pages - 1), slot = slot_in_page(p, first + n * kRows);
      if (lane == 0) load_panels<T>(tiles[ring.stage()] + n * kRows * 128, map, full[ring.stage()], slot, head, page_of_box);
    }
  } else {
    mbarrier_wait(smem_address(&empty[ring.stage()]), ring.parity() ^ 1);
    load_tile_of<T>(tiles[ring.stage()], map, full[ring.stage()], keys_before + j * C::kBlockN, head, batch);
  }
  ++ring.used;
}

// Scope: one thread; of keys in pages a warp, of which one lane does what is no look-up.
template <class C>
__device__ inline void produce(const ForwardParams& p, const TensorMaps& maps, Smem<C>& smem) {
  using S = Smem<C>;
  const bool leads = !C::kPaged || threadIdx.x == 0;
  Ring<C::kStagesQ> q;
  Ring<C::kStages> k, v;
  Tiles<C> tiles(p);
  int tile = 0;
  Work<C> next;
  auto find_next = [&] {
    if constexpr (C::kPacked) {
      const Ring<S::kWorks> works{q.used};
      mbarrier_wait(smem_address(&smem.work_full[works.stage()]), works.parity());
      tile = smem.work[works.stage()].row == kNone ? -1 : 0;
    } else {
      tile = tiles.next();
    }
  };
  find_next();
  if constexpr (!C::kPacked) next = tiles.work(p, tile);
  while (tile >= 0) {
    const Work<C> copy = next;
    const Work<C>& w = C::kPacked ? smem.work[q.used % S::kWorks] : copy;
    const int head = w.h / (p.num_heads_q / p.num_heads_kv), batch = batch_of<C>(w), keys_before = cupyflash::keys_before<C>(w.s);
    auto load_k = [&](int j, int page) {
      load_keys<C, typename S::TileK>(p, w, k, smem.k, maps.k, smem.k_full, smem.k_empty, j, page, keys_before, head, batch);
    };
    auto load_v = [&](int j, int page) {
      load_keys<C, typename S::TileV>(p, w, v, smem.v, maps.v, smem.v_full, smem.v_empty, j, page, keys_before, head, batch);
    };
    int page = look_up_pages<C>(p, w, w.keys.last - 1), page_ahead = look_up_pages<C>(p, w, w.keys.last - 2);
    load_k(w.keys.last - 1, page);
    mbarrier_wait(smem_address(&smem.q_empty[q.stage()]), q.parity() ^ 1);
    if (leads) {
      if constexpr (!C::kPacked) smem.work[q.used % S::kWorks] = w;
      load_tile_of<typename S::TileQ>(smem.q[q.stage()], maps.q, smem.q_full[q.stage()], rows_before<C>(w.s) + w.row, w.h, batch);
    }
    ++q.used;
    constexpr int kLeft = 2;  // blocks to be copied yet when the next tile is asked for: with those in flight 4,000 clocks or more
    auto ask = [&] {
      if (C::kPacked && leads) mbarrier_arrive(smem_address(&smem.work_wanted));
    };
    if (w.keys.last - 1 <= w.keys.first + kLeft) ask();
    if constexpr (!C::kPacked) {
      find_next();
      if (tile >= 0) {
        next = tiles.work(p, tile);        // divisions, while the loads are on their way
        if constexpr (C::kStagesQ == 1) {  // all blocks of the grid ask for their next Q at about the same time, too late to wait for DRAM
#pragma unroll
          for (int n = 0; n < S::TileQ::kCount; ++n) {
            if (leads) tma_prefetch(&maps.q, 64 * n, next.row, next.h, next.b);
          }
        }
      }
    }
    for (int j = w.keys.last - 2; j >= w.keys.first; --j) {
      const int page_k = page_ahead;
      page_ahead = look_up_pages<C>(p, w, j - 1);
      load_k(j, page_k);
      load_v(j + 1, page);
      page = page_k;
      if (j == w.keys.first + kLeft) ask();
    }
    load_v(w.keys.first, page);
    if constexpr (C::kPacked) find_next();
  }
  mbarrier_wait(smem_address(&smem.q_empty[q.stage()]), q.parity() ^ 1);
  if (!leads) return;
  if constexpr (!C::kPacked) smem.work[q.used % S::kWorks].row = kNone;
  mbarrier_arrive(smem_address(&smem.q_full[q.stage()]));
}

// A block that every row sees whole, for rows that have a reference: S becomes P without a row maximum on the way. A row whose weights of
// this block sum to more than kLargestSum has outgrown its reference: that moves to the row's maximum, and P, the sum and (by `grow`) O are
// scaled. Beyond 2^100 a weight may have overflowed, and the row is computed again at the end.
//
// The price is in rounding: the largest weight is not 1, which 16 bits hold exactly, but up to kLargestSum. It is felt where one key
// outweighs all others, and such rows jump: so a warp that has seen a jump takes the maximum of each block from then on.
constexpr float kLargestSum = 1024.0f;
constexpr float kFarthestWeight = 1.2676506e30f;  // 2^100

// Where nothing but the scale joins a score, and every key of a full block is visible.
template <class C>
constexpr bool kWithoutMaximum = kFused<C> && !C::kMask;

template <class C, class Grow>
__device__ inline void softmax_full(const ForwardParams& p, float (&rS)[1][C::kBlockN / 8][4], RowState<1>& state, Grow grow) {
  const float scale_log2 = fabsf(p.softmax_scale_log2);
  float sum[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < C::kBlockN / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      rS[0][n][e] = ex2(fmaf(rS[0][n][e], scale_log2, -state.reference[0][e / 2]));
      sum[e / 2] += rS[0][n][e];
    }
  }
  if (__any_sync(kWarp, !(fmaxf(sum[0], sum[1]) < kLargestSum))) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = 1.0f;
#pragma unroll
      for (int n = 0; n < C::kBlockN / 8; ++n) top = fmaxf(top, fmaxf(rS[0][n][2 * r], rS[0][n][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2));
      const bool too_far = top >= kFarthestWeight;
      const float old = state.reference[0][r], reference = too_far ? old : old + log2f(top);
      const float rescale = ex2(old - reference);
      state.reference[0][r] = reference;
      state.rescale[0][r] = rescale;
      state.sum[0][r] *= rescale;
      sum[r] = too_far ? infinity(0.0f) : sum[r] * rescale;
#pragma unroll
      for (int n = 0; n < C::kBlockN / 8; ++n) {
        rS[0][n][2 * r] *= rescale;
        rS[0][n][2 * r + 1] *= rescale;
      }
    }
    grow();
  }
  state.sum[0][0] += sum[0];
  state.sum[0][1] += sum[1];
}

// Scope: warp. Whether all of its rows have a reference.
__device__ inline bool have_reference(const RowState<1>& state) {
  return __all_sync(kWarp, fminf(state.reference[0][0], state.reference[0][1]) > -infinity(0.0f));
}

// Scope: warp. O of the rows that lie in panels, 8 where they are all that fits, as far as they are of the sequence.
template <class T, class C>
__device__ inline void copy_rows(const ForwardParams& p, const Work<C>& w, char* panels, int row) {
  constexpr int kRows = C::kOwnOut ? 8 : 16, kChunks = C::kHeadDimV / 8;
  auto* const out = static_cast<typename C::Out*>(p.out) + batch_of<C>(w) * p.out_stride_batch + w.h * p.out_stride_head +
                    (rows_before<C>(w.s) + row) * p.out_stride_seq;
  const int before = max(-row, 0) * kChunks, count = min(rows_of<C>(p, w.s) - row, kRows) * kChunks;
  __syncwarp();
#pragma unroll 1
  for (int n = before + threadIdx.x % 32; n < count; n += 32) {
    const int chunk = n % kChunks;
    if (8 * chunk < p.head_dim_v) {
      const auto& from = *reinterpret_cast<const unsigned (*)[4]>(panels + T::at(n / kChunks, chunk));
      global_store_16(out + n / kChunks * p.out_stride_seq + 8 * chunk, from);
    }
  }
  __syncwarp();
}

// The end of a tile: O and LSE of a warp's rows. O leaves by the accelerator: through the warp's own rows of sQ, or through memory of its
// own that holds eight rows. bulk_wait_read says when that is free again.
template <class C>
__device__ inline unsigned write_rows(const ForwardParams& p, const TensorMap& map, const Work<C>& w, float (&rO)[1][C::kHeadDimV / 8][4],
                                      const RowState<1>& state, char* sQ, Smem<C>& smem) {
  const unsigned thread = opaque(threadIdx.x);  // what follows from it is not to be kept through the loops before
  const int warpgroup = static_cast<int>(thread / 128) - 1, warp_row = static_cast<int>(thread / 32 % 4) * 16 + 64 * warpgroup;
  if constexpr (!C::kStoreMap) {
    return finish<C, 1>(
        p, w, rO, state, warp_row,
        [&](int row, int column, Pair<typename C::Out> pair) { store_pair<C>(p, w, w.row + warp_row + row, column, pair); }, [](int) {});
  } else {
    using TileRows = typename Choice<C::kOwnOut, typename Smem<C>::TileO, typename Smem<C>::TileQ>::Type;
    char* const rows = C::kOwnOut ? smem.o[warp_row / 16] : sQ + warp_row * 128;
    // Boxes of 8 or 16 rows must not reach into the next sequence, nor may they begin before row 0, which to the accelerator is an illegal
    // instruction where it writes, not where it reads: there lanes copy what is of this one. (To leave each pair of elements to one or the
    // other way doubled the kernel's instructions, and a tile at D = 128 took 2 us longer.)
    constexpr bool kRagged = C::kPacked || kFromLast<C>;
    const int first = w.row + warp_row;
    const bool whole = !kRagged || uniform(first >= 0 && (!C::kPacked || first + 16 <= rows_of<C>(p, w.s)));
    if constexpr (C::kOwnOut) {
      bulk_wait_read();
      __syncwarp();
    } else {
      named_barrier_sync(1 + warpgroup, 128);  // no warp still multiplies Q
    }
    return finish<C, 1>(
        p, w, rO, state, warp_row,
        [&](int row, int column, Pair<typename C::Out> pair) {
          if constexpr (C::kOwnOut) row %= 8;
          *reinterpret_cast<Pair<typename C::Out>*>(rows + TileRows::at(row, column / 8) + column % 8 * 2) = pair;
        },
        [&](int half) {
          if (!C::kOwnOut && half == 0) return;
          if (kRagged && !whole) return copy_rows<TileRows>(p, w, rows, w.row + warp_row + (C::kOwnOut ? 8 * half : 0));
          fence_async_proxy();
          __syncwarp();
          if (thread % 32 == 0) {
#pragma unroll
            for (int n = 0; n < (C::kHeadDimV + 63) / 64; ++n) {
              const int row = w.row + warp_row + (C::kOwnOut ? 8 * half : 0);
              tma_store(smem_address(rows + n * TileRows::kPanelBytes), &map, 64 * n, rows_before<C>(w.s) + row, w.h, batch_of<C>(w));
            }
          }
          bulk_commit();  // by all lanes, which keeps them together; most batches are empty
          if (C::kOwnOut && half == 0) {
            bulk_wait_read();
            __syncwarp();
          }
        });
  }
}

// Scope: warpgroup. All tiles of the block. Where Q has two buffers, the first product of the next tile is queued before the rows of this
// one are written, so that it runs meanwhile.
template <class C>
__device__ inline void consume(const ForwardParams& p, const TensorMaps& maps, Smem<C>& smem) {
  using Element = typename C::Element;
  constexpr int kConsumers = C::kBlockM / 64;
  // Three warpgroups fill each other's gaps, and have no registers for it.
  constexpr bool kAhead = C::kStagesQ > 1 && kConsumers == 2;
  // On the diagonal, where a warp sees 5/8 of a block on average.
  constexpr bool kLeavesOut =
      C::kCausal && kFused<C> && !C::kMask && kConsumers == 2 && C::kHeadDimV + C::kBlockN <= 320;  // else it spills
  constexpr bool kTogether = C::kPingPong || kAhead;  // all warpgroups multiply all blocks that are copied
  const int warpgroup = uniform(threadIdx.x / 128) - 1;
  const int warp_row = threadIdx.x / 32 * 16 - 64;
  // Ping-pong: a warpgroup queues its products when the one before it has queued its own, so that they take turns at the tensor cores, and
  // one's exponentials run under another's products.
  const int turn = 5 + warpgroup, next_turn = 5 + (warpgroup + 1) % kConsumers;

  float rO[1][C::kHeadDimV / 8][4];
  float rS[1][C::kBlockN / 8][4];
  unsigned rP[C::kBlockN / 16][4];
  RowState<1> state;
  Ring<C::kStagesQ> q;
  Ring<C::kStages> k;  // V's is one behind

  // Of the tile at hand: its place in the ring; the key blocks of the warpgroup's rows, and how many more were copied behind and before.
  int place = 0, stage = 0, behind = 0, before = 0;
  int held = -1;  // the place of the tile before it, while its rows are on their way out
  KeyBlocks keys;
  auto open_tile = [&] {
    place = q.used % Smem<C>::kWorks;
    stage = q.stage();
    mbarrier_wait(smem_address(&smem.q_full[stage]), q.parity());
    ++q.used;
    const Work<C>& w = smem.work[place];
    if (uniform(w.row) == kNone) return false;
    const KeyBlocks seen = key_blocks<C>(p, w.s, w.row + 64 * warpgroup, 64);
    keys = {uniform(seen.first), uniform(seen.last), uniform(seen.full_first), uniform(seen.full_last)};
    const int first = uniform(w.keys.first), last = uniform(w.keys.last);
    if (kTogether || keys.empty()) {  // of no keys, too, one block is multiplied, all of it masked
      keys.first = kTogether ? first : last - 1;
      keys.last = last;
    }
    behind = last - keys.last;
    before = keys.first - first;
    return true;
  };
  bool more = open_tile();
  auto multiply_first = [&] {  // the last block of keys
    const unsigned row = smem_address(smem.q[stage]) + warpgroup * 64 * 128;
    if (kFused<C> && p.softmax_scale_log2 < 0) {  // the row maximum is taken before the scale, so the scale must not turn the order
      for (int word = threadIdx.x % 128; word < 64 * 32 * Smem<C>::TileQ::kCount; word += 128) {
        const int panel = word / (64 * 32), inside = word % (64 * 32);
        reinterpret_cast<unsigned*>(smem.q[stage] + panel * Smem<C>::TileQ::kPanelBytes + warpgroup * 64 * 128)[inside] ^= 0x80008000u;
      }
      fence_async_proxy();
      named_barrier_sync(1 + warpgroup, 128);
    }
    if (more) mbarrier_wait(smem_address(&smem.k_full[k.stage()]), k.parity());  // else what was there is multiplied, for nothing
    wgmma_fence();
    issue_qk<Element, C::kBlockM, C::kBlockN, C::kHeadDim>(rS, row, smem_address(smem.k[k.stage()]));
    wgmma_commit();
  };
  auto pack_p = [&] {
#pragma unroll
    for (int n = 0; n < C::kBlockN / 16; ++n) {
      rP[n][0] = pack(rS[0][2 * n][0], rS[0][2 * n][1], Element{});
      rP[n][1] = pack(rS[0][2 * n][2], rS[0][2 * n][3], Element{});
      rP[n][2] = pack(rS[0][2 * n + 1][0], rS[0][2 * n + 1][1], Element{});
      rP[n][3] = pack(rS[0][2 * n + 1][2], rS[0][2 * n + 1][3], Element{});
    }
  };
  auto release_q = [&](int stage) {
    if (threadIdx.x % 32 == 0) {
      bulk_wait_read();
      mbarrier_arrive(smem_address(&smem.q_empty[stage]));
    }
  };
  if constexpr (kAhead) {
    multiply_first();
    wgmma_wait<0>();
  }
  while (more) {
    const Work<C>& w = smem.work[place];
    const unsigned row = smem_address(smem.q[stage]) + warpgroup * 64 * 128;
    if constexpr (!kAhead) {
      skip(smem, k, behind);
      multiply_first();
      wgmma_wait<0>();
    }
    float sink_log2 = -infinity(0.0f);
    if constexpr (C::kSink) {  // one more key, of value zero: the state after having seen it alone
      sink_log2 = widen(static_cast<const typename C::Sink*>(p.sink)[w.h * p.sink_stride]) * static_cast<float>(kLog2E);
    }
    for (int r = 0; r < 2; ++r) {
      state.reference[0][r] = sink_log2;
      state.sum[0][r] = C::kSink && threadIdx.x % 4 == 0 && sink_log2 > -infinity(0.0f) ? 1.0f : 0.0f;  // one lane of the row's four
      state.rescale[0][r] = 1.0f;
    }
    int j = keys.last - 1, accumulate = 0;
    release(smem.k_empty[k.stage()]);
    ++k.used;
    if (C::kOwnOut && j == keys.first) release(smem.q_empty[stage]);
    softmax_step<C, true, 1, kWithoutMaximum<C>, kLeavesOut>(p, w, j, rS, state, warp_row, [] {});
    pack_p();
    if constexpr (C::kUsed || C::kPacked) {  // keys past used_k are the caller's, perhaps NaN, and 0 x NaN is NaN
      const int valid = max(w.s.used_k - j * C::kBlockN, 0);
      if (valid < C::kBlockN) {
        const Ring<C::kStages> v{k.used - 1};
        mbarrier_wait(smem_address(&smem.v_full[v.stage()]), v.parity());
        const int words = (C::kBlockN - valid) * 32;
        for (int n = threadIdx.x % 128; n < words * Smem<C>::TileV::kCount; n += 128) {
          reinterpret_cast<unsigned*>(smem.v[v.stage()] + n / words * Smem<C>::TileV::kPanelBytes + valid * 128)[n % words] = 0;
        }
        fence_async_proxy();
        named_barrier_sync(1 + warpgroup, 128);
      }
    }
    if (kAhead && held >= 0) release_q(held);
    bool jumped = false, calm = have_reference(state);
    if (C::kPingPong && warpgroup == kConsumers - 1 && j > keys.first) named_barrier_arrive(next_turn, 256);
    for (--j; j >= keys.first; --j) {
      const Ring<C::kStages> v{k.used - 1};
      mbarrier_wait(smem_address(&smem.k_full[k.stage()]), k.parity());
      if constexpr (C::kPingPong) named_barrier_sync(turn, 256);
      wgmma_fence();
      issue_qk<Element, C::kBlockM, C::kBlockN, C::kHeadDim>(rS, row, smem_address(smem.k[k.stage()]));
      wgmma_commit();
      mbarrier_wait(smem_address(&smem.v_full[v.stage()]), v.parity());
      wgmma_fence();
      issue_pv<Element, C::kBlockN, C::kHeadDimV>(rO, rP, smem_address(smem.v[v.stage()]), accumulate);
      wgmma_commit();
      if (C::kPingPong && (warpgroup < kConsumers - 1 || j > keys.first)) named_barrier_arrive(next_turn, 256);
      accumulate = 1;
      wgmma_wait<1>();
      release(smem.k_empty[k.stage()]);
      ++k.used;
      if (C::kOwnOut && j == keys.first) release(smem.q_empty[stage]);
      bool grew = false;
      const bool full = keys.is_full(j);
      if (kWithoutMaximum<C> && full && calm) {
        softmax_full<C>(p, rS, state, [&] { grew = true; });
        jumped = grew;
        calm = !grew;
      } else if (!kWithoutMaximum<C> && full) {
        softmax_step<C, false, 1>(p, w, j, rS, state, warp_row, [&] { grew = true; });
      } else {
        softmax_step<C, true, 1, kWithoutMaximum<C>>(p, w, j, rS, state, warp_row, [&] { grew = true; });
        calm = !jumped && have_reference(state);
      }
      wgmma_wait<0>();
      release(smem.v_empty[v.stage()]);
      if (grew) rescale_output<C, 1>(rO, state);
      pack_p();
    }
    const Ring<C::kStages> v{k.used - 1};
    const int done = stage, done_place = place, passed = before;
    mbarrier_wait(smem_address(&smem.v_full[v.stage()]), v.parity());
    wgmma_fence();
    issue_pv<Element, C::kBlockN, C::kHeadDimV>(rO, rP, smem_address(smem.v[v.stage()]), accumulate);
    wgmma_commit();
    if constexpr (kAhead) {
      more = open_tile();
      multiply_first();
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    release(smem.v_empty[v.stage()]);
    if constexpr (!kAhead) skip(smem, k, passed);
    unsigned again = uniform(write_rows<C>(p, maps.out, smem.work[done_place], rO, state, smem.q[done], smem));
    if constexpr (kAhead) wgmma_wait<0>();
    if (again != 0) {
      bulk_wait();  // what was written of these rows is overwritten, by other lanes
      __syncwarp();
      const Work<C>& w = smem.work[done_place];
      for (; again; again &= again - 1) {
        attend_row<C>(p, uniform(w.b), uniform(w.h), uniform(w.row + warp_row + __ffs(again) - 1));
      }
    }
    fence_async_proxy();
    __syncwarp();
    if constexpr (kAhead) {
      held = done;
    } else {
      if constexpr (!C::kOwnOut) release_q(done);
      more = open_tile();
    }
  }
  bulk_wait_read();
}

template <class C>
__device__ inline void forward(const ForwardParams& p, const TensorMaps& maps, Smem<C>& smem) {
  constexpr int kConsumers = C::kBlockM / 64;
  if (threadIdx.x == 0) {
    prefetch_map(&maps.q);
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
  }
  if (threadIdx.x == 128) {
    for (int n = 0; n < C::kStagesQ; ++n) {
      mbarrier_init(smem_address(&smem.q_full[n]), 1);
      mbarrier_init(smem_address(&smem.q_empty[n]), 4 * kConsumers);
    }
    for (int n = 0; n < C::kStages; ++n) {
      mbarrier_init(smem_address(&smem.k_full[n]), 1);
      mbarrier_init(smem_address(&smem.v_full[n]), 1);
      mbarrier_init(smem_address(&smem.k_empty[n]), 4 * kConsumers);
      mbarrier_init(smem_address(&smem.v_empty[n]), 4 * kConsumers);
    }
    if constexpr (C::kPacked) {
      for (auto& full : smem.work_full) mbarrier_init(smem_address(&full), 1);
      mbarrier_init(smem_address(&smem.work_wanted), 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_give<kConsumers == 2 ? 24 : 32>();
    if (threadIdx.x < (C::kPaged ? 32 : 1)) produce<C>(p, maps, smem);
    if (C::kPacked && threadIdx.x == 32) look_up<C>(p, smem);
  } else {
    registers_take<kConsumers == 2 ? 240 : kConsumers == 3 ? 160 : 112>();  // in all no more than the block was launched with
    consume<C>(p, maps, smem);
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 1)
    fwd_sm90(const __grid_constant__ cupyflash::ForwardParams p, const __grid_constant__ cupyflash::TensorMaps maps) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  cupyflash::forward<Config>(p, maps, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
