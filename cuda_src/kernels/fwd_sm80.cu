// fwd_sm80.cu: attention forward by cp.async and mma.sync, for fp16 and bf16 on sm_80 and newer. Read it after fwd_simple.cu.
//
// Algorithm  FlashAttention-2 (arXiv 2307.08691, algorithm 1): the query block stays, the key blocks pass by. Scores are in log2 units:
//            P = exp2(S * scale_log2 - reference), where reference is the row maximum in those units as it was when a score last passed
//            it by kGrowth. Row sums are reduced across lanes once, at the end.
// Work       One block computes kBlockM rows of one head, the last row blocks of a head first: under a causal mask they are the longest.
// Walk       From the last visible key block down to the first; the diagonal and the tail are masked and come first, the left edge of a
//            window last, and between them the unmasked step runs.
// Threads    kWarps warps, each with kBlockM / kWarps rows (16 or 32) of S and O in registers.
// Smem       sQ, then kStages tiles of K and of V: the copy of block j-1 is queued before block j is multiplied.
// Edges      Rows past Sq are computed and not stored. A row that sees no key gives O = 0 and LSE = -inf.
// Way out    A row whose result is not finite, or whose logits are so large that rounding a reference moves P by more than 2^(1/4)
//            (|reference| > 2^22), is computed again by attend_row: there an invisible NaN of V cannot enter, and scores are
//            subtracted before they are scaled.
#include "../primitives/mma.cuh"
#include "../primitives/row.cuh"

namespace cupyflash {

template <class C>
struct Smem {
  using TileQ = Tile<C::kBlockM, C::kHeadDim>;
  using TileK = Tile<C::kBlockN, C::kHeadDim>;
  using TileV = Tile<C::kBlockN, C::kHeadDimV>;
  alignas(128) char q[TileQ::kBytes];
  alignas(128) char k[C::kStages][TileK::kBytes];
  alignas(128) char v[C::kStages][TileV::kBytes];
};

constexpr float kLargestReference = 4194304.0f;  // 2^22

// Without softcap, ALiBi and bias a score is scale * q.k, and the scale joins the exponent: one FFMA an element.
template <class C>
constexpr bool kFused = !(C::kSoftcap || C::kAlibi || C::kBias);

// What one block works on.
template <class C>
struct Work {
  int b, h, row;  // row: the first of the block
  Sequence s;
  ScoreContext<C> context;
  int key_first, key_last;  // key blocks

  __device__ explicit Work(const ForwardParams& p) {
    const int row_blocks = (p.seqlen_q + C::kBlockM - 1) / C::kBlockM;
    const int head = blockIdx.x / row_blocks;
    row = (row_blocks - 1 - blockIdx.x % row_blocks) * C::kBlockM;
    b = head / p.num_heads_q;
    h = head % p.num_heads_q;
    s = sequence_of<C>(p, b);
    context = score_context<C>(p, b, h);
    KeyRange keys = visible_keys<C>(p, s, row, min(row + C::kBlockM, s.used_q));
    if (row >= s.used_q) keys.last = keys.first;
    key_first = keys.first / C::kBlockN;
    key_last = keys.first < keys.last ? (keys.last + C::kBlockN - 1) / C::kBlockN : key_first;
  }

  // Whether every row of the block sees every key of key block j by length, causal and window.
  __device__ bool is_full(const ForwardParams& p, int j) const {
    const int first = j * C::kBlockN, last = first + C::kBlockN - 1;
    return last < s.used_k && in_window<C>(p, s, row, last) && in_window<C>(p, s, min(row + C::kBlockM, s.used_q) - 1, first);
  }
};

// The softmax state of a warp's rows: lane l owns rows l / 4 and l / 4 + 8 of each 16-row tile.
template <int kTiles>
struct RowState {
  float reference[kTiles][2];  // P = exp2(score - reference), all in log2 units; -inf: no key yet
  float sum[kTiles][2];        // of this lane's columns
};

// A reference moves only when a score passes it by this much: P stays below 2^8, far from fp16's 2^16, and O is hardly ever rescaled
// (the lazy rescale of FlashAttention-4). At D = 128 and 64 keys a block the rescale costs two multiplications an element of S.
constexpr float kGrowth = 8.0f;

// S, as the product leaves it, becomes P in place; where a row outgrew its reference, that moves and O is scaled.
template <class C, bool kMasked, int kTiles>
__device__ inline void softmax_step(const ForwardParams& p, const Work<C>& w, int j, float (&rS)[kTiles][C::kBlockN / 8][4],
                                    float (&rO)[kTiles][C::kHeadDimV / 8][4], RowState<kTiles>& state, int warp_row) {
  const int lane = threadIdx.x % 32;
  const float scale_log2 = kFused<C> ? fabsf(p.softmax_scale_log2) : 1.0f;
  float block_max[kTiles][2];
  bool grows = false;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.row + warp_row + 16 * m + 8 * r + lane / 4;
      float top = -infinity(0.0f);
#pragma unroll
      for (int n = 0; n < C::kBlockN / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          const int key = j * C::kBlockN + 8 * n + 2 * (lane % 4) + e % 2;
          const bool exists = (!kMasked || key < w.s.used_k) && ((!kMasked && !C::kBias && !C::kMask) || i < w.s.used_q);
          if constexpr (!kFused<C>) {
            if (exists) rS[m][n][e] = score_step<C>(p, w.context, w.s, rS[m][n][e], i, key) * static_cast<float>(kLog2E);
          }
          if constexpr (kMasked || C::kMask) {
            if (!(exists && is_visible<C>(p, w.context, w.s, i, key))) rS[m][n][e] = -infinity(0.0f);
          }
          top = fmaxf(top, rS[m][n][e]);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1));  // the four lanes of a row
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2)) * scale_log2;
      block_max[m][r] = top;
      grows = grows || top > state.reference[m][r] + kGrowth;
    }
  }
  if (__any_sync(kWarp, grows)) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float old = state.reference[m][r];
        const float reference = fmaxf(old, block_max[m][r]);
        const float rescale = old == reference ? 1.0f : ex2(old - reference);  // also where both are -inf
        state.reference[m][r] = reference;
        state.sum[m][r] *= rescale;
#pragma unroll
        for (int n = 0; n < C::kHeadDimV / 8; ++n) {
          rO[m][n][2 * r] *= rescale;
          rO[m][n][2 * r + 1] *= rescale;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float reference = (kMasked || C::kMask) && state.reference[m][r] == -infinity(0.0f) ? 0.0f : state.reference[m][r];
      float sum = state.sum[m][r];
#pragma unroll
      for (int n = 0; n < C::kBlockN / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          rS[m][n][e] = ex2(fmaf(rS[m][n][e], scale_log2, -reference));
          sum += rS[m][n][e];
        }
      }
      state.sum[m][r] = sum;
    }
  }
}

// Divides by the row sums and writes O and LSE; returns which rows of the warp attend_row must compute again, bit 16 m + 8 r + l / 4.
template <class C, int kTiles>
__device__ inline unsigned finish(const ForwardParams& p, const Work<C>& w, const float (&rO)[kTiles][C::kHeadDimV / 8][4],
                                  const RowState<kTiles>& state, int warp_row) {
  using Out = typename C::Out;
  const int lane = threadIdx.x % 32;
  Out* gO = static_cast<Out*>(p.out) + w.b * p.out_stride_batch + w.h * p.out_stride_head;
  unsigned again = 0;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.row + warp_row + 16 * m + 8 * r + lane / 4;
      float sum = state.sum[m][r];
      sum += __shfl_xor_sync(kWarp, sum, 1);
      sum += __shfl_xor_sync(kWarp, sum, 2);
      const bool used = i < w.s.used_q;
      const bool empty = state.reference[m][r] == -infinity(0.0f);
      const bool live = used && !empty;
      const float scale = 1.0f / sum;
      float total = 0;  // NaN if an element of O is not finite
#pragma unroll
      for (int n = 0; n < C::kHeadDimV / 8; ++n) {
        const int column = 8 * n + 2 * (lane % 4);
        const float low = rO[m][n][2 * r], high = rO[m][n][2 * r + 1];
        total += low * 0.0f + high * 0.0f;
        if (i < p.seqlen_q) {
          Out* target = gO + i * p.out_stride_seq + column;
          Out pair[2];
          narrow(live ? low * scale : 0.0f, pair[0]);
          narrow(live ? high * scale : 0.0f, pair[1]);
          if (!C::kUnaligned && column + 1 < p.head_dim_v) {
            *reinterpret_cast<PairOf<sizeof(Out)>*>(target) = *reinterpret_cast<PairOf<sizeof(Out)>*>(pair);
          } else {
            if (column < p.head_dim_v) target[0] = pair[0];
            if (column + 1 < p.head_dim_v) target[1] = pair[1];
          }
        }
      }
      if constexpr (C::kWriteLse) {
        const float lse = live ? (state.reference[m][r] + log2f(sum)) * static_cast<float>(1 / kLog2E) : -infinity(0.0f);
        if (lane % 4 == 0 && i < p.seqlen_q) {
          static_cast<float*>(p.lse)[(static_cast<long long>(w.b) * p.num_heads_q + w.h) * p.seqlen_q + i] = lse;
        }
      }
      const bool in_range = total == 0.0f && sum > 0.0f && sum < infinity(0.0f) && fabsf(state.reference[m][r]) <= kLargestReference;
      unsigned bad = __ballot_sync(kWarp, used && !in_range && !(empty && total == 0.0f && sum == 0.0f));
#pragma unroll
      for (int row = 0; row < 8; ++row) again |= (bad >> (4 * row) & 0xf) ? 1u << (16 * m + 8 * r + row) : 0u;
    }
  }
  return again;
}

template <class C>
__device__ inline void forward(const ForwardParams& p, Smem<C>& smem) {
  using Element = typename C::Element;
  using S = Smem<C>;
  constexpr int kThreads = 32 * C::kWarps;
  constexpr int kTiles = C::kBlockM / C::kWarps / 16;
  static_assert(kTiles * 16 * C::kWarps == C::kBlockM && kTiles <= 2, "a warp owns 16 or 32 rows");
  static_assert(C::kStages == 2, "one block of keys is multiplied while the next one arrives");
  const Work<C> w(p);
  const int warp_row = threadIdx.x / 32 * 16 * kTiles;
  const int group = p.num_heads_q / p.num_heads_kv;

  const Element* gQ = static_cast<const Element*>(p.q) + w.b * p.q_stride_batch + w.h * p.q_stride_head;
  const Element* gK = static_cast<const Element*>(p.k) + w.b * p.k_stride_batch + w.h / group * p.k_stride_head;
  const Element* gV = static_cast<const Element*>(p.v) + w.b * p.v_stride_batch + w.h / group * p.v_stride_head;

  // Only the last key block can end inside, and it is loaded first.
  auto load_keys = [&](auto tail, int j) {
    constexpr bool kTail = decltype(tail)::value;
    const int first = j * C::kBlockN, valid = w.s.used_k - first;
    load_tile<typename S::TileK, kThreads, kTail, C::kUnaligned>(smem.k[j % 2], gK + first * p.k_stride_seq, p.k_stride_seq, valid,
                                                                 p.head_dim);
    load_tile<typename S::TileV, kThreads, kTail, C::kUnaligned>(smem.v[j % 2], gV + first * p.v_stride_seq, p.v_stride_seq, valid,
                                                                 p.head_dim_v);
    cp_async_commit();
  };

  float rO[kTiles][C::kHeadDimV / 8][4] = {};
  RowState<kTiles> state;
  float sink_log2 = -infinity(0.0f);
  if constexpr (C::kSink) {  // one more key, of value zero: the state after having seen it alone
    sink_log2 = widen(static_cast<const typename C::Sink*>(p.sink)[w.h * p.sink_stride]) * static_cast<float>(kLog2E);
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    for (int r = 0; r < 2; ++r) {
      state.reference[m][r] = sink_log2;
      state.sum[m][r] = C::kSink && threadIdx.x % 4 == 0 && sink_log2 > -infinity(0.0f) ? 1.0f : 0.0f;  // one lane of the row's four
    }
  }

  if (w.key_first < w.key_last) {
    load_tile<typename S::TileQ, kThreads, true, C::kUnaligned>(smem.q, gQ + w.row * p.q_stride_seq, p.q_stride_seq, w.s.used_q - w.row,
                                                                p.head_dim);
    load_keys(Constant<true>{}, w.key_last - 1);
    if (kFused<C> && p.softmax_scale_log2 < 0) {  // the row maximum is taken before the scale, so the scale must not turn the order
      cp_async_wait<0>();
      __syncthreads();  // Q is there
      for (int word = threadIdx.x; word < S::TileQ::kBytes / 4; word += kThreads) reinterpret_cast<unsigned*>(smem.q)[word] ^= 0x80008000u;
    }
  }
  auto step = [&](auto masked, int j) {
    constexpr bool kMasked = decltype(masked)::value;
    cp_async_wait<0>();
    __syncthreads();  // block j has arrived for all threads, and all have done with the buffers of block j + 1
    if (j > w.key_first) load_keys(Constant<false>{}, j - 1);
    float rS[kTiles][C::kBlockN / 8][4];
    multiply_qk<Element, typename S::TileQ, typename S::TileK, kTiles, C::kBlockN, C::kHeadDim>(rS, smem.q, smem.k[j % 2], warp_row);
    softmax_step<C, kMasked, kTiles>(p, w, j, rS, rO, state, warp_row);
    multiply_pv<Element, typename S::TileV, kTiles, C::kBlockN, C::kHeadDimV>(rO, rS, smem.v[j % 2]);
  };
  for (int j = w.key_last - 1; j >= w.key_first; --j) {
    if (w.is_full(p, j)) {
      step(Constant<false>{}, j);
    } else {
      step(Constant<true>{}, j);
    }
  }

  unsigned again = finish<C, kTiles>(p, w, rO, state, warp_row);
  __syncwarp();  // what finish wrote of these rows is overwritten by other lanes
  for (; again; again &= again - 1) attend_row<C>(p, w.b, w.h, w.row + warp_row + __ffs(again) - 1);
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) fwd_sm80(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::forward<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
