// fwd_sm80.cu: attention forward by cp.async and mma.sync, for fp16 and bf16 on sm_80 and newer. Read it after fwd_simple.cu.
//
// Algorithm  FlashAttention-2 (arXiv 2307.08691, algorithm 1): the query block stays, the key blocks pass by. Scores are in log2 units:
//            P = exp2(S * scale_log2 - reference), where reference is the row maximum in those units as it was when a score last passed
//            it by kGrowth. Row sums are reduced across lanes once, at the end.
// Work       One block computes kBlockM rows of one head, the last row blocks of a head first: under a causal mask they are the longest.
//            Of packed sequences as they are listed (packed_tiles.cu).
// Walk       From the last visible key block down to the first; the diagonal and the tail are masked and come first, the left edge of a
//            window last, and between them the unmasked step runs.
// Threads    kWarps warps, each with kBlockM / kWarps rows (16 or 32) of S and O in registers.
// Smem       sQ, then kStages tiles of K and of V: the copy of block j-1 is queued before block j is multiplied.
// Edges      Rows past Sq are computed and not stored. A row that sees no key gives O = 0 and LSE = -inf.
// Way out    A row whose result is not finite, or whose logits are so large that rounding a reference moves P by more than 2^(1/4)
//            (|reference| > 2^22), is computed again by attend_row: there an invisible NaN of V cannot enter, and scores are
//            subtracted before they are scaled.
#include "../primitives/mma.cuh"
#include "../primitives/softmax.cuh"

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

template <class C>
__device__ inline void forward(const ForwardParams& p, Smem<C>& smem) {
  using Element = typename C::Element;
  using S = Smem<C>;
  constexpr int kThreads = 32 * C::kWarps;
  constexpr int kTiles = C::kBlockM / C::kWarps / 16;
  static_assert(kTiles * 16 * C::kWarps == C::kBlockM && kTiles <= 2, "a warp owns 16 or 32 rows");
  static_assert(C::kStages == 2, "one block of keys is multiplied while the next one arrives");
  if (!has_work<C>(p)) return;
  const Work<C> w = row_work<C>(p);
  const int warp_row = threadIdx.x / 32 * 16 * kTiles;
  const int group = p.num_heads_q / p.num_heads_kv;

  const Element* gQ =
      static_cast<const Element*>(p.q) + w.b * p.q_stride_batch + w.h * p.q_stride_head + rows_before<C>(w.s) * p.q_stride_seq;
  const long long first_key = keys_before<C>(w.s);
  const Element* gK =
      static_cast<const Element*>(p.k) + w.b * p.k_stride_batch + w.h / group * p.k_stride_head + first_key * p.k_stride_seq;
  const Element* gV =
      static_cast<const Element*>(p.v) + w.b * p.v_stride_batch + w.h / group * p.v_stride_head + first_key * p.v_stride_seq;

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

  if (!w.keys.empty()) {
    load_tile<typename S::TileQ, kThreads, true, C::kUnaligned>(smem.q, gQ + w.row * p.q_stride_seq, p.q_stride_seq, w.s.used_q - w.row,
                                                                p.head_dim);
    load_keys(Constant<true>{}, w.keys.last - 1);
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
    if (j > w.keys.first) load_keys(Constant<false>{}, j - 1);
    float rS[kTiles][C::kBlockN / 8][4];
    multiply_qk<Element, typename S::TileQ, typename S::TileK, kTiles, C::kBlockN, C::kHeadDim>(rS, smem.q, smem.k[j % 2], warp_row);
    softmax_step<C, kMasked, kTiles>(p, w, j, rS, state, warp_row, [&] { rescale_output<C, kTiles>(rO, state); });
    multiply_pv<Element, typename S::TileV, kTiles, C::kBlockN, C::kHeadDimV>(rO, rS, smem.v[j % 2]);
  };
  for (int j = w.keys.last - 1; j >= w.keys.first; --j) {
    if (w.keys.is_full(j)) {
      step(Constant<false>{}, j);
    } else {
      step(Constant<true>{}, j);
    }
  }

  auto store = [&](int row, int column, Pair<typename C::Out> pair) { store_pair<C>(p, w, w.row + warp_row + row, column, pair); };
  unsigned again = finish<C, kTiles>(p, w, rO, state, warp_row, store, [](int) {});
  __syncwarp();  // what finish wrote of these rows is overwritten by other lanes
  for (; again; again &= again - 1) attend_row<C>(p, w.b, w.h, w.row + warp_row + __ffs(again) - 1);
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) fwd_sm80(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::forward<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
