// decode.cu: attention of few query rows over many keys, in pages or not, by cp.async and mma.sync, for fp16 and bf16 on sm_80 and newer.
// Read it after fwd_sm80.cu.
//
// Algorithm  Flash-Decoding (Dao et al. 2023): blocks compute parts of the keys, each a softmax of its own, which are merged by their LSE.
//            The query heads that read one key head are rows of one tile, so K and V pass by once.
// Work       The units of all sequences and key heads, C::kWarps * kBlockN keys each, stand in one row, and each block takes an equal share
//            of it: what it has of one (sequence, key head, block of rows) is a segment. At most its first and its last segment are parts
//            of something larger. With `split` a unit is such a split instead, and each split a part: what a sequence
//            gets then does not depend on the others.
// Threads    A warp has all rows, and of each unit kBlockN keys of its own: it copies them itself, kStages ahead, and waits for nobody.
// What
//            the warps have is merged through shared memory at the end of a segment.
// Merge      The block that finishes the last part of something merges all of them, in the order of their keys: it is the same result bit
//            by bit whoever is last. The counters are zero before the kernel, and it leaves them so.
// Edges      A key that no row sees is not read. A sequence without keys has one unit, of which nothing is visible.
// Way out    As fwd_sm80: a row that left the range is computed again by attend_row.
#include "../primitives/mma.cuh"
#include "../primitives/softmax.cuh"

namespace cupyflash {

// What a sequence has to compute, in units and blocks of rows.
template <class C>
struct Extent {
  static constexpr int kUnit = C::kWarps * C::kBlockN;  // keys
  SequenceOf<C> s;
  KeyRange keys;  // that some row sees
  int rows;       // of a key head: all tokens of all its query heads
  int row_blocks, first_unit, units, piece_units, pieces;

  __device__ Extent(const ForwardParams& p, int b) : s(sequence_of<C>(p, b)) {
    keys = visible_keys<C>(p, s, 0, s.used_q);
    keys.first = max(keys.first, b >= 0 && b < p.batch ? first_slot<C>(p, b) : 0);
    if (s.used_q == 0 || keys.last < keys.first) keys.last = keys.first;
    rows = p.num_heads_q / p.num_heads_kv * rows_of<C>(p, s);
    row_blocks = (rows + C::kBlockM - 1) / C::kBlockM;
    const int split = max(p.split, 1);  // splits begin at its multiples, whatever the window hides
    first_unit = keys.first / kUnit / split * split;
    units = max((keys.last + kUnit - 1) / kUnit - first_unit, 1);
    piece_units = p.split < 0 ? (units - p.split - 1) / -p.split : split;
    pieces = (units + piece_units - 1) / piece_units;
  }
  __device__ int weight(const ForwardParams& p) const { return pieces * p.num_heads_kv * row_blocks; }
};

// Packed, numbers -1 and B are tokens of no sequence, whose results are zeros.
template <class C>
__device__ inline int num_sequences(const ForwardParams& p) {
  return p.batch + (C::kPacked ? 2 : 0);
}
template <class C>
__device__ inline int sequence_number(int n) {
  return n - (C::kPacked ? 1 : 0);
}

template <class C>
struct Smem {
  using TileQ = Tile<C::kBlockM, C::kHeadDim>;
  using TileK = Tile<C::kBlockN, C::kHeadDim>;
  using TileV = Tile<C::kBlockN, C::kHeadDimV>;
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
  int weights[32 * C::kWarps];  // of the sequences of each thread
  int first_inside;             // where the block begins: how many pieces lie before it in that sequence
  int first_sequence;
  int is_last;
};

// The row of pieces, and the block's share of it: the first `more` blocks have one more than the others.
struct Share {
  int blocks, each, more, begin, end;

  __device__ Share(int total, int block, int most) {
    blocks = min(total, most);
    each = blocks > 0 ? total / blocks : 0;
    more = total - each * blocks;
    begin = begin_of(min(block, blocks));
    end = begin_of(min(block + 1, blocks));
  }
  __device__ int begin_of(int block) const { return each * block + min(block, more); }
  __device__ int block_of(int piece) const {
    const int longer = more * (each + 1);
    return piece < longer ? piece / (each + 1) : more + (piece - longer) / each;
  }
};

// Scope: block. How many pieces there are, and in which sequence the block's first one lies.
template <class C>
__device__ inline Share find_share(const ForwardParams& p, Smem<C>& smem) {
  constexpr int kThreads = 32 * C::kWarps;
  const int count = num_sequences<C>(p), each = (count + kThreads - 1) / kThreads, first = threadIdx.x * each;
  int mine = 0;
  for (int n = first; n < min(first + each, count); ++n) mine += Extent<C>(p, sequence_number<C>(n)).weight(p);
  smem.weights[threadIdx.x] = mine;
  __syncthreads();
  int total = 0, before = 0;
  for (int n = 0; n < kThreads; ++n) {
    before += n < threadIdx.x ? smem.weights[n] : 0;
    total += smem.weights[n];
  }
  const Share share(total, blockIdx.x, gridDim.x);
  if (share.begin < share.end && before <= share.begin && share.begin < before + mine) {
    int n = first;
    for (int weight; (weight = Extent<C>(p, sequence_number<C>(n)).weight(p)) <= share.begin - before; ++n) before += weight;
    smem.first_sequence = n;
    smem.first_inside = share.begin - before;
  }
  __syncthreads();
  return share;
}

// Some pieces of one (sequence, key head, block of rows).
template <class C>
struct Segment {
  int b, h_kv, row;     // row: the first of the block
  int unit, last_unit;  // [unit, last_unit)
};

// Which token of the sequence a row is, and of which query head.
template <class C>
struct RowPlace {
  int token, h;
  __device__ RowPlace(const ForwardParams& p, const Segment<C>& g, int row) {
    const int group = p.num_heads_q / p.num_heads_kv;
    token = (g.row + row) / group;
    h = g.h_kv * group + (g.row + row) % group;
  }
};

// Scope: block.
template <class C>
__device__ inline void load_queries(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem) {
  using Element = typename C::Element;
  using T = typename Smem<C>::TileQ;
  const bool turn = kFused<C> && p.softmax_scale_log2 < 0;  // the row maximum is taken before the scale, which must not turn the order
  for (int n = threadIdx.x; n < C::kBlockM * T::kChunks; n += 32 * C::kWarps) {
    const int row = n / T::kChunks, chunk = n % T::kChunks;
    const RowPlace<C> at(p, g, row);
    const bool exists = g.row + row < e.rows && at.token < e.s.used_q;
    const Element* gQ = static_cast<const Element*>(p.q) + g.b * p.q_stride_batch + at.h * p.q_stride_head +
                        (rows_before<C>(e.s) + at.token) * p.q_stride_seq;
    unsigned x[4] = {};
    if (exists && (!C::kUnaligned || 8 * chunk + 8 <= p.head_dim) && 8 * chunk < p.head_dim) {
      if constexpr (C::kUnaligned) {
        for (int k = 0; k < 8; ++k) reinterpret_cast<Element*>(x)[k] = gQ[8 * chunk + k];
      } else {
        global_load_16(x, gQ + 8 * chunk);
      }
    } else if (C::kUnaligned && exists) {
      for (int k = 0; 8 * chunk + k < p.head_dim; ++k) reinterpret_cast<Element*>(x)[k] = gQ[8 * chunk + k];
    }
    for (unsigned& word : x) word ^= turn ? 0x80008000u : 0u;
    auto* const to = reinterpret_cast<unsigned*>(smem.q + T::at(row, chunk));
    for (int k = 0; k < 4; ++k) to[k] = x[k];
  }
}

// Where the keys of a warp's next tile lie, in elements from the first of K and of V: lane l knows it of key l % kBlockN, one step before
// they are copied, since the table of pages has to be read first.
struct KeyPlaces {
  long long k, v;
  unsigned exist;  // a bit for each key
};
template <class C>
__device__ inline KeyPlaces places_of(const ForwardParams& p, const Extent<C>& e, int b, int first_key) {
  const int key = first_key + threadIdx.x % C::kBlockN;
  const bool exists = key >= e.keys.first && key < e.keys.last;
  int page = C::kPacked && !C::kPaged ? 0 : b, slot = static_cast<int>(keys_before<C>(e.s)) + key;
  if constexpr (C::kPaged) {
    slot = key;
    if (exists && p.page_table) {
      page = clamp(p.page_table[b * p.page_table_stride + key / p.page_size], 0, p.num_pages - 1);
      slot = key % p.page_size;
    }
  }
  const unsigned exist = __ballot_sync(kWarp, exists);
  if (!exists) page = slot = 0;
  return {page * p.k_stride_batch + slot * p.k_stride_seq, page * p.v_stride_batch + slot * p.v_stride_seq, exist};
}

// Scope: warp. Queues the copy of its keys, or of its values: lanes of a row copy 16 bytes each.
template <class C, class T>
__device__ inline void load_rows_of(char* tile, const typename C::Element* head, long long place, unsigned exist, int width) {
  constexpr int kLanes = T::kChunks % 8 == 0 ? 8 : T::kChunks % 4 == 0 ? 4 : 2, kRows = 32 / kLanes;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < (C::kBlockN + kRows - 1) / kRows; ++n) {
    const int row = n * kRows + lane / kLanes;
    const typename C::Element* const from = head + __shfl_sync(kWarp, place, row % C::kBlockN);
    if (C::kBlockN % kRows != 0 && row >= C::kBlockN) continue;
    const bool exists = exist >> row & 1;
#pragma unroll
    for (int c = 0; c < T::kChunks / kLanes; ++c) {
      const int chunk = c * kLanes + lane % kLanes;
      if constexpr (C::kUnaligned) {
        auto* const to = reinterpret_cast<typename C::Element*>(tile + T::at(row, chunk));
        for (int k = 0; k < 8; ++k) to[k] = exists && 8 * chunk + k < width ? from[8 * chunk + k] : typename C::Element{};
      } else {
        cp_async_16(smem_address(tile + T::at(row, chunk)), from + 8 * chunk, exists && 8 * chunk < width ? 16 : 0);
      }
    }
  }
}

// What a lane must know of its two rows.
template <class C>
struct LaneRows {
  int token[2];
  KeyRange seen[2];
  ScoreContext<C> context[2];

  __device__ LaneRows(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = threadIdx.x % 32 / 4 + 8 * r;
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

// S, as the product leaves it, becomes P in place, and O follows a reference that moves (softmax.cuh).
template <class C>
__device__ inline void weigh(const ForwardParams& p, const Extent<C>& e, const LaneRows<C>& rows, int first_key,
                             float (&rS)[1][C::kBlockN / 8][4], float (&rO)[1][C::kHeadDimV / 8][4], float (&reference)[2],
                             float (&sum)[2]) {
  const float scale_log2 = kFused<C> ? fabsf(p.softmax_scale_log2) : 1.0f;
  float top[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = -infinity(0.0f);
#pragma unroll
    for (int n = 0; n < C::kBlockN / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = rS[0][n][2 * r + c];
        const int key = first_key + 8 * n + 2 * (threadIdx.x % 4) + c;
        const bool visible = key >= rows.seen[r].first && key < rows.seen[r].last;
        if constexpr (!kFused<C>) {
          if (visible) score = score_step<C>(p, rows.context[r], e.s, score, rows.token[r], key) * static_cast<float>(kLog2E);
        }
        if (!visible) score = -infinity(0.0f);
        top[r] = fmaxf(top[r], score);
      }
    }
    top[r] = fmaxf(top[r], __shfl_xor_sync(kWarp, top[r], 1));  // the four lanes of a row
    top[r] = fmaxf(top[r], __shfl_xor_sync(kWarp, top[r], 2)) * scale_log2;
  }
  if (__any_sync(kWarp, top[0] > reference[0] + kGrowth || top[1] > reference[1] + kGrowth)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float old = reference[r];
      reference[r] = fmaxf(old, top[r]);
      const float rescale = old == reference[r] ? 1.0f : ex2(old - reference[r]);  // also where both are -inf
      sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < C::kHeadDimV / 8; ++n) {
        rO[0][n][2 * r] *= rescale;
        rO[0][n][2 * r + 1] *= rescale;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float from = reference[r] == -infinity(0.0f) ? 0.0f : reference[r];
#pragma unroll
    for (int n = 0; n < C::kBlockN / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = rS[0][n][2 * r + c];
        score = ex2(fmaf(score, scale_log2, -from));
        sum[r] += score;
      }
    }
  }
}

// Scope: warp. Its share of a segment's keys; O, references and sums go to shared memory.
template <class C>
__device__ inline void compute(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem) {
  using Element = typename C::Element;
  using S = Smem<C>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto& stages = smem.stages[warp];
  const Element* gK = static_cast<const Element*>(p.k) + g.h_kv * p.k_stride_head;
  const Element* gV = static_cast<const Element*>(p.v) + g.h_kv * p.v_stride_head;
  auto key_of = [&](int unit) { return unit * Extent<C>::kUnit + warp * C::kBlockN; };
  KeyPlaces at = places_of<C>(p, e, g.b, key_of(g.unit));
  auto load = [&](int unit) {
    if (unit < g.last_unit) {
      auto& stage = stages[(unit - g.unit) % C::kStages];
      const KeyPlaces now = at;
      at = places_of<C>(p, e, g.b, key_of(unit + 1));
      load_rows_of<C, typename S::TileK>(stage.k, gK, now.k, now.exist, p.head_dim);
      load_rows_of<C, typename S::TileV>(stage.v, gV, now.v, now.exist, p.head_dim_v);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int n = 0; n < C::kStages - 1; ++n) load(g.unit + n);

  float rO[1][C::kHeadDimV / 8][4] = {};
  float reference[2] = {-infinity(0.0f), -infinity(0.0f)}, sum[2] = {};
  const LaneRows<C> rows(p, e, g);
  for (int unit = g.unit; unit < g.last_unit; ++unit) {
    cp_async_wait<C::kStages - 2>();
    __syncwarp();  // its keys have arrived for all lanes, and all have done with those before them
    load(unit + C::kStages - 1);
    const auto& stage = stages[(unit - g.unit) % C::kStages];
    float rS[1][C::kBlockN / 8][4];
    multiply_qk<Element, typename S::TileQ, typename S::TileK, 1, C::kBlockN, C::kHeadDim>(rS, smem.q, stage.k, 0);
    weigh<C>(p, e, rows, key_of(unit), rS, rO, reference, sum);
    multiply_pv<Element, typename S::TileV, 1, C::kBlockN, C::kHeadDimV>(rO, rS, stage.v);
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
    for (int n = 0; n < C::kHeadDimV / 8; ++n) {
      *reinterpret_cast<float2*>(&smem.out[warp][row][8 * n + 2 * (lane % 4)]) = float2{rO[0][n][2 * r], rO[0][n][2 * r + 1]};
    }
  }
  __syncthreads();
}

// A row of O while parts are merged: a thread's columns, four neighbours in each 32. Weights are relative to 2^reference.
template <class C>
struct MergedRow {
  static constexpr int kThreads = 8;  // of a row
  static constexpr int kGroups = (C::kHeadDimV + 31) / 32;
  float reference = -infinity(0.0f), sum = 0;
  float out[kGroups][4] = {};

  __device__ static int column(int group) { return 32 * group + 4 * (threadIdx.x % kThreads); }
  __device__ static bool exists(int group) { return C::kHeadDimV % 32 == 0 || column(group) < C::kHeadDimV; }
  __device__ float weight(float log2) const { return reference == -infinity(0.0f) ? 0.0f : ex2(log2 - reference); }
  __device__ void add(float weight, int group, const float* x) {
#pragma unroll
    for (int n = 0; n < 4; ++n) out[group][n] += weight * x[n];
  }
  __device__ float lse() const { return reference + log2f(sum); }  // in log2 units
};

// Scope: block, which has 8 threads a row. What the warps have of a row.
template <class C>
__device__ inline MergedRow<C> merge_warps(const Smem<C>& smem, int row) {
  MergedRow<C> merged;
  for (int w = 0; w < C::kWarps; ++w) merged.reference = fmaxf(merged.reference, smem.reference[w][row]);
  for (int w = 0; w < C::kWarps; ++w) {
    const float weight = merged.weight(smem.reference[w][row]);
    merged.sum += weight * smem.sum[w][row];
    for (int n = 0; n < MergedRow<C>::kGroups; ++n) {
      if (MergedRow<C>::exists(n)) merged.add(weight, n, &smem.out[w][row][MergedRow<C>::column(n)]);
    }
  }
  return merged;
}

// Scope: block. A row of a part goes to memory: O divided by its sum, and its LSE.
template <class C>
__device__ inline void leave_part(const ForwardParams& p, long long slot, int row, const MergedRow<C>& merged) {
  const bool empty = merged.reference == -infinity(0.0f);
  const float scale = empty ? 0.0f : 1.0f / merged.sum;
  for (int n = 0; n < MergedRow<C>::kGroups; ++n) {
    if (!MergedRow<C>::exists(n)) continue;
    unsigned x[4];
    for (int c = 0; c < 4; ++c) x[c] = __float_as_uint(empty ? 0.0f : merged.out[n][c] * scale);
    global_store_16(p.part_out + (slot * C::kBlockM + row) * C::kHeadDimV + MergedRow<C>::column(n), x);
  }
  if (threadIdx.x % MergedRow<C>::kThreads == 0) p.part_lse[slot * C::kBlockM + row] = empty ? -infinity(0.0f) : merged.lse();
}

// Scope: block. All parts of a row, which other blocks wrote as well; slot(n) says where part n is.
template <class C, class Slot>
__device__ inline MergedRow<C> merge_parts(const ForwardParams& p, int row, int count, Slot slot) {
  MergedRow<C> merged;
  auto lse = [&](int n) { return global_load_l2(p.part_lse + static_cast<long long>(slot(n)) * C::kBlockM + row); };
  for (int n = 0; n < count; ++n) merged.reference = fmaxf(merged.reference, lse(n));
  for (int n = 0; n < count; ++n) {
    const float weight = merged.weight(lse(n));
    merged.sum += weight;
    for (int m = 0; m < MergedRow<C>::kGroups; ++m) {
      if (!MergedRow<C>::exists(m)) continue;
      float x[4];
      global_load_l2_4(x, p.part_out + (static_cast<long long>(slot(n)) * C::kBlockM + row) * C::kHeadDimV + MergedRow<C>::column(m));
      merged.add(weight, m, x);
    }
  }
  return merged;
}

// Scope: block. A row goes to O and LSE; what left the range is computed again.
template <class C>
__device__ inline void write_row(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, int row, MergedRow<C> merged) {
  using Out = typename C::Out;
  const RowPlace<C> at(p, g, row);
  const bool exists = g.row + row < e.rows, used = exists && at.token < e.s.used_q;
  if constexpr (C::kSink) {  // one more key, of value zero
    if (used) {
      const float sink = widen(static_cast<const typename C::Sink*>(p.sink)[at.h * p.sink_stride]) * static_cast<float>(kLog2E);
      const float old = merged.reference;
      merged.reference = fmaxf(old, sink);
      const float rescale = merged.weight(old);
      merged.sum = merged.sum * rescale + merged.weight(sink);
      for (auto& group : merged.out) {
        for (float& x : group) x *= rescale;
      }
    }
  }
  const bool empty = merged.reference == -infinity(0.0f);
  const float scale = used && !empty ? 1.0f / merged.sum : 0.0f;
  unsigned not_finite = 0;
  if (exists) {
    Out* const out = static_cast<Out*>(p.out) + g.b * p.out_stride_batch + at.h * p.out_stride_head +
                     (rows_before<C>(e.s) + at.token) * p.out_stride_seq;
    for (int n = 0; n < MergedRow<C>::kGroups; ++n) {
      for (int c = 0; c < 4; c += 2) {
        const int column = MergedRow<C>::column(n) + c;
        const float low = used ? merged.out[n][c] * scale : 0.0f, high = used ? merged.out[n][c + 1] * scale : 0.0f;
        const Pair<Out> pair = narrow_pair<Out>(low, high);
        if (column < p.head_dim_v) watch(pair, not_finite);
        store_pair<C::kUnaligned>(out + column, column, p.head_dim_v, pair);
      }
    }
    if constexpr (C::kWriteLse) {
      const float lse = used && !empty ? merged.lse() * static_cast<float>(1 / kLog2E) : -infinity(0.0f);
      if (threadIdx.x % MergedRow<C>::kThreads == 0) static_cast<float*>(p.lse)[first_in_vector<C>(p, e.s, g.b, at.h) + at.token] = lse;
    }
  }
  const bool in_range = (not_finite & 0x7fff7fff) == 0 &&
                        (empty || (merged.sum > 0.0f && merged.sum < infinity(0.0f) && fabsf(merged.reference) <= kLargestReference));
  for (unsigned bad = __ballot_sync(kWarp, used && !in_range); bad;) {
    const int thread = (__ffs(bad) - 1) / MergedRow<C>::kThreads;  // of the warp's rows
    const RowPlace<C> lost(p, g, row / (32 / MergedRow<C>::kThreads) * (32 / MergedRow<C>::kThreads) + thread);
    __syncwarp();  // what was written of this row is overwritten by other lanes
    attend_row<C>(p, g.b, lost.h, lost.token);
    bad &= ~(0xffu << thread * MergedRow<C>::kThreads);
  }
}

// Scope: block.
template <class C>
__device__ inline void decode(const ForwardParams& p, Smem<C>& smem) {
  constexpr int kThreads = 32 * C::kWarps;
  static_assert(C::kBlockM == 16 && kThreads == C::kBlockM * MergedRow<C>::kThreads, "a row has 8 threads when parts are merged");
  const Share share = find_share<C>(p, smem);
  if (share.begin >= share.end) return;
  const bool splits = p.split != 0;  // each is a part
  const int row = threadIdx.x / MergedRow<C>::kThreads;
  int n = smem.first_sequence;
  int inside = smem.first_inside;
  for (int piece = share.begin; piece < share.end;) {
    const int b = sequence_number<C>(n);
    const Extent<C> e(p, b);
    const int weight = e.weight(p);
    if (inside >= weight) {
      inside -= weight;
      ++n;
      continue;
    }
    const int item = inside / e.pieces, from = inside % e.pieces;
    const int count = splits ? 1 : min(e.pieces - from, share.end - piece);
    const int unit = e.first_unit + from * e.piece_units, last_unit = min(unit + count * e.piece_units, e.first_unit + e.units);
    const Segment<C> g{b, item / e.row_blocks, item % e.row_blocks * C::kBlockM, unit, last_unit};
    load_queries<C>(p, e, g, smem);
    __syncthreads();
    compute<C>(p, e, g, smem);
    MergedRow<C> merged = merge_warps<C>(smem, row);
    bool done = count == e.pieces;
    if (!done) {
      // Parts are numbered by their piece; or by their block, which has two at most: what it begins with, and what it ends with.
      const int first = piece - from, first_block = share.block_of(first);
      auto slot_of_block = [&](int block) { return 2 * block + (share.begin_of(block) < first ? 1 : 0); };
      const int parts = splits ? e.pieces : share.block_of(first + e.pieces - 1) - first_block + 1;
      leave_part<C>(p, splits ? piece : slot_of_block(blockIdx.x), row, merged);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        int* const arrived = p.arrived + (splits ? first : first_block);
        smem.is_last = atomicAdd(arrived, 1) == parts - 1;
        if (smem.is_last) *arrived = 0;
      }
      __syncthreads();
      done = smem.is_last;
      if (done) {
        __threadfence();
        merged = merge_parts<C>(p, row, parts, [&](int m) { return splits ? first + m : slot_of_block(first_block + m); });
      }
    }
    if (done) write_row<C>(p, e, g, row, merged);
    __syncthreads();  // all have done with the results before the next keys come
    piece += count;
    inside += count;
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) decode(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::decode<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
