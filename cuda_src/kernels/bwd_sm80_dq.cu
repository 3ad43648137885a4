// bwd_sm80_dq.cu: dQ by cp.async and mma.sync, in one fixed order of additions, for fp16 and bf16 on sm_80 and newer. Read it after
// fwd_sm80.cu, whose loop this is, and bwd_sm80.cu.
//
// Algorithm  FlashAttention-2's backward (arXiv 2307.08691, algorithm 2) with its loops exchanged: the block of rows stays, the key blocks
//            pass by. dS is computed in registers, whose layout is that of the left operand of dQ += dS K. For a call that asks for
//            deterministic sums, for dQ alone, or for the gradient of ALiBi slopes: with bwd_sm80, it multiplies 7 times instead of 5.
// Work       One block computes kBlockM rows of one head, the last row blocks of a head first: under a causal mask they are the longest.
// Walk       From the last visible key block down to the first.
// Threads    kWarps warps, each with kBlockM / kWarps rows (16 or 32) of S, dP and dQ in registers.
// Smem       sQ, sdO, then kStages tiles of K and of V.
// Edges      Rows past Sq are computed and not stored. A row that sees no key gives dQ = 0.
// Way out    A row whose dQ is not finite is computed again by row_gradient (see gradient.cuh).
#include "../primitives/gradient.cuh"

namespace cupyflash {

template <class C>
struct Smem {
  using TileQ = Tile<C::kBlockM, C::kHeadDim>;
  using TileO = Tile<C::kBlockM, C::kHeadDimV>;
  using TileK = Tile<C::kBlockN, C::kHeadDim>;
  using TileV = Tile<C::kBlockN, C::kHeadDimV>;
  alignas(128) char q[TileQ::kBytes];
  alignas(128) char dout[TileO::kBytes];
  alignas(128) char k[C::kStages][TileK::kBytes];
  alignas(128) char v[C::kStages][TileV::kBytes];
};

template <class C>
__device__ inline void backward(const BackwardParams& p, Smem<C>& smem) {
  using Element = typename C::Element;
  using M = Smem<C>;
  const ForwardParams& f = p.forward;
  constexpr int kThreads = 32 * C::kWarps;
  constexpr int kTiles = C::kBlockM / C::kWarps / 16;
  static_assert(kTiles * 16 * C::kWarps == C::kBlockM && kTiles <= 2, "a warp owns 16 or 32 rows");
  static_assert(C::kStages == 2, "one block of keys is multiplied while the next one arrives");
  if (!has_work<C>(f)) return;
  const Work<C> w = row_work<C>(f);
  const int warp_row = threadIdx.x / 32 * 16 * kTiles;
  const int h_kv = w.h / (f.num_heads_q / f.num_heads_kv);
  const long long rows_before = cupyflash::rows_before<C>(w.s), keys_before = cupyflash::keys_before<C>(w.s);
  const auto* gK = static_cast<const Element*>(f.k) + w.b * f.k_stride_batch + h_kv * f.k_stride_head + keys_before * f.k_stride_seq;
  const auto* gV = static_cast<const Element*>(f.v) + w.b * f.v_stride_batch + h_kv * f.v_stride_head + keys_before * f.v_stride_seq;
  const long long head_row = first_in_vector<C>(f, w.s, w.b, w.h);

  // Only the last key block can end inside, and it is loaded first.
  auto load_keys = [&](auto tail, int j) {
    constexpr bool kTail = decltype(tail)::value;
    const int first = j * C::kBlockN, valid = w.s.used_k - first;
    load_tile<typename M::TileK, kThreads, kTail, C::kUnaligned>(smem.k[j % 2], gK + first * f.k_stride_seq, f.k_stride_seq, valid,
                                                                 f.head_dim);
    load_tile<typename M::TileV, kThreads, kTail, C::kUnaligned>(smem.v[j % 2], gV + first * f.v_stride_seq, f.v_stride_seq, valid,
                                                                 f.head_dim_v);
    cp_async_commit();
  };

  RowVectors<kTiles> rows;
  float rdQ[kTiles][C::kHeadDim / 8][4] = {};
  float slope[kTiles][2] = {};  // this lane's part of the sum over keys of dS * distance
  if (w.keys.first < w.keys.last) {
    const int valid = w.s.used_q - w.row;
    const auto* gQ =
        static_cast<const Element*>(f.q) + w.b * f.q_stride_batch + w.h * f.q_stride_head + (rows_before + w.row) * f.q_stride_seq;
    const auto* gdO = static_cast<const typename C::Out*>(p.dout) + w.b * p.dout_stride_batch + w.h * p.dout_stride_head +
                      (rows_before + w.row) * p.dout_stride_seq;
    constexpr bool kByElement = C::kUnaligned || !kSame<Element, typename C::Out>;
    load_tile<typename M::TileQ, kThreads, true, C::kUnaligned>(smem.q, gQ, f.q_stride_seq, valid, f.head_dim);
    if constexpr (kByElement) {
      load_elements<Element, typename M::TileO, kThreads, true>(smem.dout, gdO, p.dout_stride_seq, p.dout_stride_dim, valid, f.head_dim_v);
    } else {
      load_tile<typename M::TileO, kThreads, true, false>(smem.dout, gdO, p.dout_stride_seq, valid, f.head_dim_v);
    }
    load_keys(Constant<true>{}, w.keys.last - 1);
    const long long row = head_row + w.row + warp_row;
    read_vectors(rows, p.row_reference + row, static_cast<const float*>(p.row_delta) + row, valid - warp_row);
  }
  for (int j = w.keys.last - 1; j >= w.keys.first; --j) {
    cp_async_wait<0>();
    __syncthreads();  // block j has arrived for all threads, and all have done with the buffers of block j + 1
    if (j > w.keys.first) load_keys(Constant<false>{}, j - 1);
    const char *sK = smem.k[j % 2], *sV = smem.v[j % 2];

    float rS[kTiles][C::kBlockN / 8][4], rdP[kTiles][C::kBlockN / 8][4];
    multiply_qk<Element, typename M::TileQ, typename M::TileK, kTiles, C::kBlockN, C::kHeadDim>(rS, smem.q, sK, warp_row);
    multiply_qk<Element, typename M::TileO, typename M::TileV, kTiles, C::kBlockN, C::kHeadDimV>(rdP, smem.dout, sV, warp_row, 0,
                                                                                                 rows.minus_delta);
    auto step = [&](auto masked) {
      gradient_step<C, decltype(masked)::value, kTiles, C::kBlockN>(
          f, w.context, w.s, w.row + warp_row, j * C::kBlockN, rS, rdP, rows, [&](int m, int, int e, int i, int key, float d_score) {
            if constexpr (C::kAlibi) slope[m][e / 2] += d_score * static_cast<float>(abs(i + w.s.offset - key));
          });
    };
    if (w.keys.is_full(j)) {
      step(Constant<false>{});
    } else {
      step(Constant<true>{});
    }
    multiply_pv<Element, typename M::TileK, kTiles, C::kBlockN, C::kHeadDim>(rdQ, rdP, sK);
  }

  if constexpr (C::kAlibi) {
    if (p.dalibi_slopes) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float sum = slope[m][r];
          sum += __shfl_xor_sync(kWarp, sum, 1);  // the four lanes of a row
          sum += __shfl_xor_sync(kWarp, sum, 2);
          const int i = w.row + warp_row + 16 * m + 8 * r + threadIdx.x % 32 / 4;
          if (threadIdx.x % 4 == 0 && i < rows_of<C>(f, w.s)) static_cast<float*>(p.row_slope)[head_row + i] = sum;
        }
      }
    }
  }
  finish_rows<C, kTiles>(p, w.s, w.b, w.h, w.row + warp_row, rdQ);
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, Config::kBlocks)
    bwd_sm80_dq(const __grid_constant__ cupyflash::BackwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::backward<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
