// decode.cuh: what the kernels of few query rows over many keys share: what a sequence has to compute, how keys come, how parts are merged.
#pragma once

#include "bytes.cuh"
#include "softmax.cuh"

namespace cupyflash {

// Whether the cache has numbers of 8 bits.
template <class C>
constexpr bool kQuantised = !kSame<typename C::Cached, typename C::Element>;

// What a sequence has to compute, in units and blocks of rows.
template <class C>
struct Extent {
  static constexpr int kUnit = C::kKeyWarps * C::kBlockN;  // keys
  SequenceOf<C> s;
  KeyRange keys;  // that some row sees
  int rows;       // of a key head: all tokens of all its query heads
  int row_blocks, first_unit, units, piece_units, pieces;

  __device__ Extent(const ForwardParams& p, int b) : s(sequence_of<C>(p, b)) {
    keys = visible_keys<C>(p, s, 0, s.used_q);
    keys.first = max(keys.first, b >= 0 && b < p.batch ? first_slot<C>(p, b) : 0);
    if (s.used_q == 0 || keys.last < keys.first) keys.last = keys.first;
    rows = p.group * rows_of<C>(p, s);
    row_blocks = (rows + C::kBlockM - 1) / C::kBlockM;
    first_unit = keys.first / kUnit;
    if (C::kSplits && p.split > 0) first_unit -= first_unit % p.split;  // splits begin at its multiples, whatever the window hides
    pieces = units = max((keys.last + kUnit - 1) / kUnit - first_unit, 1);
    piece_units = 1;
    if constexpr (C::kSplits) {
      piece_units = p.split > 0 ? p.split : (units - p.split - 1) / -p.split;
      pieces = (units + piece_units - 1) / piece_units;
    }
  }
  __device__ int items(const ForwardParams& p) const { return row_blocks * p.head_groups; }
  __device__ int weight(const ForwardParams& p) const { return pieces * items(p); }
};

// Rows that left the range: a bit for each.
template <class C>
struct LostRows {
  unsigned bits[(C::kBlockM + 31) / 32];

  __device__ void clear() {
    for (unsigned& word : bits) word = 0;
  }
  __device__ void add(int row) { atomicOr(&bits[row / 32], 1u << row % 32); }
  __device__ bool has(int row) const { return bits[row / 32] >> row % 32 & 1; }
  __device__ bool any() const {
    unsigned all = 0;
    for (unsigned word : bits) all |= word;
    return all;
  }
};

// Where a piece or item is: in which sequence, -1 for none; how many of these of that sequence lie before it; and how many pieces before
// that sequence.
struct Place {
  int sequence, inside, before;
};

// What a block must know of its share, and what its warps tell one another.
template <class C>
struct Shared {
  int weights[C::kWarps];  // of the sequences of each warp
  Place found;
  int is_last;
  LostRows<C> lost;
};

// Where each warp has keys of its own.
template <class C>
struct SmemOfWarps {
  using TileQ = Tile<C::kBlockM, C::kHeadDim>;
  static constexpr int kBytes = sizeof(typename C::Cached);
  using TileK = Tile<C::kBlockN, C::kHeadDim * kBytes / 2>;
  using TileV = Tile<C::kBlockN, C::kHeadDimV * kBytes / 2>;
  static constexpr int kPitch = C::kHeadDimV + 8;  // of merged rows: lanes of a row and of the next seven fall into different banks
  struct Stage {
    alignas(128) char k[TileK::kBytes];
    alignas(128) char v[TileV::kBytes];
  };
  alignas(128) char q[TileQ::kBytes];
  union {
    Stage stages[C::kWarps][C::kStages];
    float out[C::kWarps][C::kBlockM][kPitch];
  };
  float reference[C::kWarps][C::kBlockM], sum[C::kWarps][C::kBlockM];
  Shared<C> shared;
  float row_scale[C::kBlockM];                               // of scores over a quantised cache
  float block_reference[C::kBlockM], block_sum[C::kBlockM];  // decode_cluster.cu: of all warps, whose O is in the place of the first one's
};
template <class C>
struct SmemOfAll;  // latent_sm90.cu
template <class C>
using Smem = typename Choice<C::kKeyWarps == C::kWarps, SmemOfWarps<C>, SmemOfAll<C>>::Type;

// Some pieces of one (sequence, key head, block of rows).
template <class C>
struct Segment {
  int b, h_kv, row;     // row: the first of the block
  int unit, last_unit;  // [unit, last_unit)
};

// The segment of an item of sequence b: its pieces in the order of groups of key heads, then blocks of rows.
template <class C>
__device__ inline Segment<C> segment_of(const Extent<C>& e, int b, int item, int heads, int own_head, int unit, int last_unit) {
  const int head_group = e.row_blocks == 1 ? item : item / e.row_blocks;
  return {b, head_group * heads + own_head, (item - head_group * e.row_blocks) * C::kBlockM, unit, last_unit};
}

// Which token of the sequence a row is, and of which query head.
template <class C>
struct RowPlace {
  int token, h;
  __device__ RowPlace(const ForwardParams& p, const Segment<C>& g, int row) {
    token = quotient(g.row + row, p.group_multiplier, p.group_shift);
    h = g.h_kv * p.group + g.row + row - token * p.group;
  }
};

// Where a row begins, or null.
template <class C>
__device__ inline const typename C::Element* query_row(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, int row) {
  const RowPlace<C> at(p, g, row);
  if (g.row + row >= e.rows || at.token >= e.s.used_q) return nullptr;
  return static_cast<const typename C::Element*>(p.q) + g.b * p.q_stride_batch + at.h * p.q_stride_head +
         (rows_before<C>(e.s) + at.token) * p.q_stride_seq;
}

// Scope: block. The rows of a segment as fp16, for a quantised cache: each times a power of two, so that its largest number lies near 2^14.
// What is then too small for fp16 is less than 2^-38 of it.
template <class C>
__device__ inline void narrow_queries(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem) {
  using T = typename Smem<C>::TileQ;
  constexpr int kPairs = (C::kHeadDim / 2 + 31) / 32;  // of a lane
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < C::kBlockM; row += C::kWarps) {
    const typename C::Element* const gQ = query_row<C>(p, e, g, row);
    float x[kPairs][2], largest = 0;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int d = 2 * (lane + 32 * n) + c;
        x[n][c] = gQ && d < p.head_dim ? widen(gQ[d]) : 0.0f;
        largest = fmaxf(largest, fabsf(x[n][c]));
      }
    }
    for (int distance = 16; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, distance));
    const int exponent = min(127 + 14 + 127 - (__float_as_int(largest) >> 23), 253);  // as float32 has it
    const float scale = __int_as_float(exponent << 23);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int place = place_in_row(2 * (lane + 32 * n));
      if (C::kHeadDim % 64 != 0 && place >= C::kHeadDim) continue;
      *reinterpret_cast<unsigned*>(smem.q + T::at(row, place / 8) + place % 8 * 2) = pack(x[n][0] * scale, x[n][1] * scale, Half{});
    }
    if (lane == 0 && gQ) {
      const long long head = g.b * p.k_descale_stride_batch + g.h_kv * p.k_descale_stride_head;
      smem.row_scale[row] = __int_as_float((254 - exponent) << 23) * descale_of(p.k_descale, p.k_descale_of_all, head);
    }
  }
}

// Scope: block. Queues the copy of a segment's rows.
template <class C>
__device__ inline void copy_queries(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem) {
  using Element = typename C::Element;
  using T = typename Smem<C>::TileQ;
  for (int n = threadIdx.x; n < C::kBlockM * T::kChunks; n += 32 * C::kWarps) {
    const int row = n / T::kChunks, chunk = n % T::kChunks;
    const Element* const gQ = query_row<C>(p, e, g, row);
    const bool exists = gQ;
    if constexpr (C::kUnaligned) {
      auto* const to = reinterpret_cast<Element*>(smem.q + T::at(row, chunk));
      for (int k = 0; k < 8; ++k) to[k] = exists && 8 * chunk + k < p.head_dim ? gQ[8 * chunk + k] : Element{};
    } else {
      cp_async_16(smem_address(smem.q + T::at(row, chunk)), gQ + 8 * chunk, exists && 8 * chunk < p.head_dim ? 16 : 0);
    }
  }
}

// Scope: block. The rows of a segment, for which `compute` waits.
template <class C>
__device__ inline void load_queries(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem) {
  if constexpr (kQuantised<C>) {
    narrow_queries<C>(p, e, g, smem);
  } else {
    copy_queries<C>(p, e, g, smem);
  }
}

// How lanes share a copy of rows of a tile: of each row kLanes copy 16 bytes, and again until it is whole; kRows rows at a time.
template <class T>
struct RowCopy {
  static constexpr int kLanes = T::kChunks % 8 == 0 ? 8 : T::kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kRows = 32 / kLanes;

  // Scope: warp. Queues a copy of kCount rows; `row_at(n)` says for the lane's row of the n-th time where it begins, null for no row.
  template <class C, int kCount, class RowAt>
  __device__ static void queue(char* tile, int width, RowAt row_at) {
    using Cached = typename C::Cached;
    constexpr int kPer = 16 / sizeof(Cached);  // elements of 16 bytes
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < (kCount + kRows - 1) / kRows; ++n) {
      const int row = n * kRows + lane / kLanes;
      const Cached* const from = row_at(n, row);
      if (kCount % kRows != 0 && row >= kCount) continue;
#pragma unroll
      for (int c = 0; c < T::kChunks / kLanes; ++c) {
        const int chunk = c * kLanes + lane % kLanes;
        if constexpr (C::kUnaligned) {
          auto* const to = reinterpret_cast<Cached*>(tile + T::at(row, chunk));
          for (int k = 0; k < kPer; ++k) to[k] = from && kPer * chunk + k < width ? from[kPer * chunk + k] : Cached{};
        } else {
          const int bytes = kQuantised<C> ? clamp(width - 16 * chunk, 0, 16) : 8 * chunk < width ? 16 : 0;
          cp_async_16(smem_address(tile + T::at(row, chunk)), from + kPer * chunk, from ? bytes : 0);
        }
      }
    }
  }
};

// What a lane must know of its two rows.
template <class C>
struct LaneRows {
  int token[2];
  KeyRange seen[2];
  ScoreContext<C> context[2];

  __device__ LaneRows(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, int first_row = 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + threadIdx.x % 32 / 4 + 8 * r;
      const RowPlace<C> at(p, g, row);
      token[r] = at.token;
      seen[r] = {0, 0};
      if (g.row + row < e.rows && at.token < e.s.used_q) {
        seen[r] = visible_keys<C>(p, e.s, at.token, at.token + 1);
        seen[r].first = max(seen[r].first, e.keys.first);
        context[r] = score_context<C>(p, g.b, at.h);
      }
    }
  }
};

// S, as the product leaves it, becomes scores in place; `top` gets the largest of each of the lane's two rows, in log2 units.
template <class C, int kTiles>
__device__ inline void score_keys(const ForwardParams& p, const Extent<C>& e, const LaneRows<C>& rows, const float* row_scale,
                                  int first_key, float (&rS)[1][kTiles][4], float (&top)[2]) {
  const bool turn = kFused<C> && p.softmax_scale_log2 < 0;  // the row maximum is taken before the scale, which must not turn the order
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = -infinity(0.0f);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = rS[0][n][2 * r + c];
        const int key = first_key + 8 * n + 2 * (threadIdx.x % 4) + c;
        const bool visible = key >= rows.seen[r].first && key < rows.seen[r].last;
        if constexpr (kQuantised<C>) score *= row_scale[threadIdx.x % 32 / 4 + 8 * r];
        if constexpr (!kFused<C>) {
          if (visible) score = score_step<C>(p, rows.context[r], e.s, score, rows.token[r], key) * static_cast<float>(kLog2E);
        }
        score = !visible ? -infinity(0.0f) : turn ? -score : score;
        top[r] = fmaxf(top[r], score);
      }
    }
    top[r] = fmaxf(top[r], __shfl_xor_sync(kWarp, top[r], 1));  // the four lanes of a row
    top[r] = fmaxf(top[r], __shfl_xor_sync(kWarp, top[r], 2)) * (kFused<C> ? fabsf(p.softmax_scale_log2) : 1.0f);
  }
}

// Scores become P in place, and O follows a reference that moves (softmax.cuh).
template <class C, int kTiles, int kColumns>
__device__ inline void weigh(const ForwardParams& p, const float (&top)[2], float (&rS)[1][kTiles][4], float (&rO)[1][kColumns][4],
                             float (&reference)[2], float (&sum)[2]) {
  const float scale_log2 = kFused<C> ? fabsf(p.softmax_scale_log2) : 1.0f;
  if (__any_sync(kWarp, top[0] > reference[0] + kGrowth || top[1] > reference[1] + kGrowth)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float old = reference[r];
      reference[r] = fmaxf(old, top[r]);
      const float rescale = old == reference[r] ? 1.0f : ex2(old - reference[r]);  // also where both are -inf
      sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        rO[0][n][2 * r] *= rescale;
        rO[0][n][2 * r + 1] *= rescale;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float from = reference[r] == -infinity(0.0f) ? 0.0f : reference[r];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = rS[0][n][2 * r + c];
        score = ex2(fmaf(score, scale_log2, -from));
        sum[r] += score;
      }
    }
  }
}

// The keys of a segment that are a warp's, as they come.
template <class C>
struct KeyStream {
  using Element = typename C::Cached;
  using CopyK = RowCopy<typename Smem<C>::TileK>;
  using CopyV = RowCopy<typename Smem<C>::TileV>;
  const ForwardParams& p;
  const Extent<C>& e;
  const Segment<C>& g;
  typename Smem<C>::Stage (&stages)[C::kStages];
  const Element *gK, *gV;  // where the head begins; not of pages, where the lane's first rows of the next copy do
  // Of small pages a lane knows those of its own keys: of every 32nd.
  static constexpr int kOwnKeys = C::kWholePages || C::kBlockN < 32 ? 1 : C::kBlockN / 32;
  int pages[kOwnKeys];  // of the next copy, as the table has them, which is read a step ahead: of its first key, or of the lane's own

  __device__ KeyStream(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem)
      : p(p), e(e), g(g), stages(smem.stages[threadIdx.x / 32]) {
    gK = static_cast<const Element*>(p.k) + g.h_kv * p.k_stride_head;
    gV = static_cast<const Element*>(p.v) + g.h_kv * p.v_stride_head;
    if constexpr (C::kPaged) {
      look_up(g.unit);
    } else {
      const long long key = keys_before<C>(e.s) + key_of(g.unit);
      gK += (C::kPacked ? 0 : g.b) * p.k_stride_batch + (key + threadIdx.x % 32 / CopyK::kLanes) * p.k_stride_seq;
      gV += (C::kPacked ? 0 : g.b) * p.v_stride_batch + (key + threadIdx.x % 32 / CopyV::kLanes) * p.v_stride_seq;
    }
  }
  __device__ int key_of(int unit) const { return unit * Extent<C>::kUnit + threadIdx.x / 32 * C::kBlockN; }
  __device__ const typename Smem<C>::Stage& stage(int unit) const { return stages[(unit - g.unit) % C::kStages]; }
  __device__ bool exists(int key) const { return key >= e.keys.first && key < e.keys.last; }
  __device__ int own_key(int unit, int n) const {
    return key_of(unit) + (C::kWholePages ? 0 : 32 * n + threadIdx.x % (C::kBlockN < 32 ? C::kBlockN : 32));
  }
  __device__ void look_up(int unit) {
#pragma unroll
    for (int n = 0; n < kOwnKeys; ++n) {
      const int key = own_key(unit, n);
      pages[n] = key + (C::kWholePages ? C::kBlockN - 1 : 0) >= e.keys.first && key < e.keys.last ? page_of(p, g.b, key) : 0;
    }
  }
  __device__ void load(int unit) {
    if (unit < g.last_unit) {
      auto& to = stages[(unit - g.unit) % C::kStages];
      const int key = key_of(unit);
      const Element *nowK[kOwnKeys], *nowV[kOwnKeys];
#pragma unroll
      for (int n = 0; n < kOwnKeys; ++n) {
        nowK[n] = gK, nowV[n] = gV;
        if constexpr (C::kPaged) {
          const int of = clamp(pages[n], 0, p.num_pages - 1), slot = slot_in_page(p, own_key(unit, n)), lane = threadIdx.x % 32;
          nowK[n] += of * p.k_stride_batch + (slot + (C::kWholePages ? lane / CopyK::kLanes : 0)) * p.k_stride_seq;
          nowV[n] += of * p.v_stride_batch + (slot + (C::kWholePages ? lane / CopyV::kLanes : 0)) * p.v_stride_seq;
        }
      }
      if constexpr (C::kPaged) {
        look_up(unit + 1);
      } else {
        gK += Extent<C>::kUnit * p.k_stride_seq;
        gV += Extent<C>::kUnit * p.v_stride_seq;
      }
      auto row_at = [&](const Element*(&now)[kOwnKeys], long long stride, int n, int row, int rows) {
        const Element* from;
        if constexpr (C::kPaged && !C::kWholePages) {
          const auto own = reinterpret_cast<unsigned long long>(now[kOwnKeys > 1 ? n * rows / 32 : 0]);
          from = reinterpret_cast<const Element*>(__shfl_sync(kWarp, own, row % C::kBlockN));  // which counts lanes modulo 32
        } else {
          from = now[0] + n * rows * stride;
        }
        return exists(key + row) ? from : nullptr;
      };
      CopyK::template queue<C, C::kBlockN>(to.k, p.head_dim,
                                           [&](int n, int row) { return row_at(nowK, p.k_stride_seq, n, row, CopyK::kRows); });
      CopyV::template queue<C, C::kBlockN>(to.v, p.head_dim_v,
                                           [&](int n, int row) { return row_at(nowV, p.v_stride_seq, n, row, CopyV::kRows); });
    }
    cp_async_commit();
  }
};

// Scope: block. Each warp its share of a segment's keys; O, references and sums go to shared memory.
template <class C>
__device__ inline void compute(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem) {
  using Element = typename C::Element;
  using S = Smem<C>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float rO[1][C::kHeadDimV / 8][4] = {};
  float reference[2] = {-infinity(0.0f), -infinity(0.0f)}, sum[2] = {};
  KeyStream<C> keys(p, e, g, smem);
  const LaneRows<C> rows(p, e, g);
#pragma unroll 1
  for (int unit = g.unit - (C::kStages - 1); unit < g.last_unit; ++unit) {  // it begins with copies alone: short code is there sooner
    if (unit >= g.unit) cp_async_wait<C::kStages - 2>();
    if (unit == g.unit) {
      __syncthreads();  // the rows have arrived, too
    } else {
      __syncwarp();  // its keys have arrived for all lanes, and all have done with those before them
    }
    keys.load(unit + C::kStages - 1);
    if (unit < g.unit) continue;
    const auto& stage = keys.stage(unit);
    float rS[1][C::kBlockN / 8][4];
    if constexpr (kQuantised<C>) {
      multiply_qk_bytes<C, typename S::TileQ, typename S::TileK, C::kBlockN, C::kHeadDim>(rS, smem.q, stage.k);
    } else {
      multiply_qk<Element, typename S::TileQ, typename S::TileK, 1, C::kBlockN, C::kHeadDim>(rS, smem.q, stage.k, 0);
    }
    float top[2];
    score_keys<C>(p, e, rows, smem.row_scale, keys.key_of(unit), rS, top);
    weigh<C>(p, top, rS, rO, reference, sum);
    if constexpr (kQuantised<C>) {
      multiply_pv_bytes<C, typename S::TileV, C::kBlockN, C::kHeadDimV>(rO, rS, stage.v);
    } else {
      multiply_pv<Element, typename S::TileV, 1, C::kBlockN, C::kHeadDimV>(rO, rS, stage.v);
    }
  }
  cp_async_wait<0>();
  __syncthreads();  // the buffers become those of the results
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    sum[r] += __shfl_xor_sync(kWarp, sum[r], 1);
    sum[r] += __shfl_xor_sync(kWarp, sum[r], 2);
    if (lane % 4 == 0) {
      smem.reference[warp][row] = reference[r];
      smem.sum[warp][row] = sum[r];
    }
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 16; ++n) {
      const float (&left)[4] = rO[0][2 * n], (&right)[4] = rO[0][2 * n + 1];
      float* const out = &smem.out[warp][row][16 * n];
      if constexpr (kQuantised<C>) {  // whose columns alternate
        *reinterpret_cast<float4*>(out + 4 * (lane % 4)) = float4{left[2 * r], right[2 * r], left[2 * r + 1], right[2 * r + 1]};
      } else {
        *reinterpret_cast<float2*>(out + 2 * (lane % 4)) = float2{left[2 * r], left[2 * r + 1]};
        *reinterpret_cast<float2*>(out + 8 + 2 * (lane % 4)) = float2{right[2 * r], right[2 * r + 1]};
      }
    }
  }
  __syncthreads();
}

// Four neighbours in a row of O, relative to 2^reference, and what the row's sum of weights is: what a thread has while parts are merged.
template <class C>
struct Merged {
  static constexpr int kOfRow = C::kHeadDimV / 4;
  int row, column;
  float reference = -infinity(0.0f), sum = 0, out[4] = {};

  __device__ explicit Merged(int n) : row(n / kOfRow), column(n % kOfRow * 4) {}
  __device__ float weight(float log2) const { return reference == -infinity(0.0f) ? 0.0f : ex2(log2 - reference); }
  __device__ void raise(float to) {
    const float old = reference;
    reference = fmaxf(old, to);
    const float rescale = old == reference ? 1.0f : ex2(old - reference);
    sum *= rescale;
    for (float& x : out) x *= rescale;
  }
  __device__ void add(float log2, float of_sum, const float* x) {
    const float w = weight(log2);
    sum += w * of_sum;
    for (int n = 0; n < 4; ++n) out[n] += w * x[n];
  }
  __device__ bool empty() const { return reference == -infinity(0.0f); }
  __device__ float lse() const { return empty() ? -infinity(0.0f) : reference + log2f(sum); }  // in log2 units
};

// Scope: thread. What the warps have.
template <class C>
__device__ inline Merged<C> merge_warps(const Smem<C>& smem, int n) {
  Merged<C> merged(n);
#pragma unroll
  for (int w = 0; w < C::kKeyWarps; ++w) merged.reference = fmaxf(merged.reference, smem.reference[w][merged.row]);
#pragma unroll
  for (int w = 0; w < C::kKeyWarps; ++w) {
    merged.add(smem.reference[w][merged.row], smem.sum[w][merged.row], &smem.out[w][merged.row][merged.column]);
  }
  return merged;
}

// Scope: thread. Its part of a row goes to O and LSE; rows that left the range are noted.
template <class C>
__device__ inline void write(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Merged<C> merged, LostRows<C>& lost) {
  using Out = typename C::Out;
  const RowPlace<C> at(p, g, merged.row);
  const bool used = at.token < e.s.used_q;
  if constexpr (C::kSink) {  // one more key, of value zero
    if (used) {
      const float sink = widen(static_cast<const typename C::Sink*>(p.sink)[at.h * p.sink_stride]) * static_cast<float>(kLog2E);
      merged.raise(sink);
      merged.sum += merged.weight(sink);
    }
  }
  float scale = used && !merged.empty() ? 1.0f / merged.sum : 0.0f;
  if constexpr (kQuantised<C>) {
    if (used) scale *= descale_of(p.v_descale, p.v_descale_of_all, g.b * p.v_descale_stride_batch + g.h_kv * p.v_descale_stride_head);
  }
  unsigned not_finite = 0;
  Out* const out =
      static_cast<Out*>(p.out) + g.b * p.out_stride_batch + at.h * p.out_stride_head + (rows_before<C>(e.s) + at.token) * p.out_stride_seq;
  for (int c = 0; c < 4; c += 2) {
    const int column = merged.column + c;
    const Pair<Out> pair = narrow_pair<Out>(used ? merged.out[c] * scale : 0.0f, used ? merged.out[c + 1] * scale : 0.0f);
    if (column < p.head_dim_v) watch(pair, not_finite);
    store_pair<C::kUnaligned>(out + column, column, p.head_dim_v, pair);
  }
  if constexpr (C::kWriteLse) {
    const float lse = used ? merged.lse() * static_cast<float>(1 / kLog2E) : -infinity(0.0f);
    if (merged.column == 0) static_cast<float*>(p.lse)[first_in_vector<C>(p, e.s, g.b, at.h) + at.token] = lse;
  }
  const bool in_range =
      (not_finite & 0x7fff7fff) == 0 &&
      (merged.empty() || (merged.sum > 0.0f && merged.sum < infinity(0.0f) && fabsf(merged.reference) <= kLargestReference));
  if (used && !in_range) lost.add(merged.row);
}

// Scope: block. Computes rows again that left the range, after what was written of them.
template <class C>
__device__ inline void write_lost(const ForwardParams& p, const Segment<C>& g, const LostRows<C>& lost) {
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < C::kBlockM; row += C::kWarps) {
    const RowPlace<C> at(p, g, row);
    if (lost.has(row)) attend_row<C>(p, g.b, at.h, at.token);
  }
}

}  // namespace cupyflash
