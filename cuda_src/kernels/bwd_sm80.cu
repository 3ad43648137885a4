// bwd_sm80.cu: dK, dV and, where no order of additions is asked for, dQ, by cp.async and mma.sync, for fp16 and bf16 on sm_80 and newer.
// Read it after fwd_sm80.cu and bwd_simple.cu; bwd_delta.cu has run before it, bwd_convert.cu runs after it.
//
// Algorithm  FlashAttention-2's backward (arXiv 2307.08691, algorithm 2): a block of keys stays, the blocks of rows pass by. S and dP are
//            computed again; P = exp2(S * scale_log2 - LSE_log2) and dS = P (dP - delta), in 16 bits, go through shared memory, where the
//            other three products read them, transposed or not. dP starts at -delta. dK and dV stay in registers.
// Work       One block computes kBlockN keys of one key head: all query heads that read it, one after another, so no sum over them is left.
//            The first key blocks of a head come first: under a causal mask they are the longest.
// Walk       From the last visible row block down to the first, of each query head.
// Threads    kWarps warps, which share each product in their own way: S and dP kWarpsM along the rows, dK and dV kWarpsN along the keys,
//            dQ kWarpsQ along the rows, the rest of the warps along the columns.
// Smem       sK, sV; kStages tiles of Q and dO, LSE and delta; P and dS.
// dQ         kSumQ: added to dq_sum by atomics, in no fixed order; bwd_convert makes dQ of it. Else bwd_sm80_dq computes it.
// Edges      Rows past their used length are zeros with LSE = +inf: P = 0. Keys past theirs get zeros.
// Way out    A key whose dK or dV is not finite is computed again by key_gradient (see gradient.cuh).
#include "../primitives/gradient.cuh"

namespace cupyflash {

template <class C>
struct Smem {
  using TileK = Tile<C::kBlockN, C::kHeadDim>;
  using TileV = Tile<C::kBlockN, C::kHeadDimV>;
  using TileQ = Tile<C::kBlockM, C::kHeadDim>;
  using TileO = Tile<C::kBlockM, C::kHeadDimV>;
  using TileP = Tile<C::kBlockM, C::kBlockN>;
  alignas(128) char k[TileK::kBytes];
  alignas(128) char v[TileV::kBytes];
  alignas(128) char q[C::kStages][TileQ::kBytes];
  alignas(128) char dout[C::kStages][TileO::kBytes];
  alignas(128) char p[TileP::kBytes];
  alignas(128) char ds[TileP::kBytes];
  float reference[C::kStages][C::kBlockM];
  float delta[C::kStages][C::kBlockM];
};

template <class C>
__device__ inline void backward(const BackwardParams& p, Smem<C>& smem) {
  using Element = typename C::Element;
  using M = Smem<C>;
  const ForwardParams& f = p.forward;
  constexpr int kThreads = 32 * C::kWarps;
  constexpr int kTilesS = C::kBlockM / C::kWarpsM / 16, kKeysS = C::kBlockN / (C::kWarps / C::kWarpsM);
  constexpr int kTilesK = C::kBlockN / C::kWarpsN / 16, kWarpsD = C::kWarps / C::kWarpsN;
  constexpr int kTilesQ = C::kBlockM / C::kWarpsQ / 16, kWarpsE = C::kWarps / C::kWarpsQ;
  static_assert(kTilesS * 16 * C::kWarpsM == C::kBlockM && kKeysS % 16 == 0 && kKeysS * (C::kWarps / C::kWarpsM) == C::kBlockN);
  static_assert(kTilesK * 16 * C::kWarpsN == C::kBlockN && kTilesQ * 16 * C::kWarpsQ == C::kBlockM);
  using ColumnsK = Dealt<C::kHeadDim, kWarpsD>;
  using ColumnsV = Dealt<C::kHeadDimV, kWarpsD>;
  using ColumnsQ = Dealt<C::kHeadDim, kWarpsE>;

  const int key_blocks = (f.seqlen_k + C::kBlockN - 1) / C::kBlockN;
  const KeyWork<C> w(f, blockIdx.x / key_blocks, blockIdx.x % key_blocks);
  const int group = f.num_heads_q / f.num_heads_kv;
  const int warp = threadIdx.x / 32;
  const int row_s = warp % C::kWarpsM * 16 * kTilesS, key_s = warp / C::kWarpsM * kKeysS;  // what the warp has of S and dP,
  const int key_k = warp % C::kWarpsN * 16 * kTilesK, part_k = warp / C::kWarpsN;          // of dK and dV,
  const int row_q = warp % C::kWarpsQ * 16 * kTilesQ, part_q = warp / C::kWarpsQ;          // and of dQ

  // A row block of a query head, and where its rows lie.
  struct Rows {
    int h, i;
    const Element* q;
    const typename C::Out* dout;
    long long vector;  // of row_reference and row_delta
    float* sums;
  };
  auto last_of = [&](int h) {
    const int i = w.row_last - 1;
    const long long row = static_cast<long long>(i) * C::kBlockM;
    return Rows{h,
                i,
                static_cast<const Element*>(f.q) + w.b * f.q_stride_batch + h * f.q_stride_head + row * f.q_stride_seq,
                static_cast<const typename C::Out*>(p.dout) + w.b * p.dout_stride_batch + h * p.dout_stride_head + row * p.dout_stride_seq,
                (static_cast<long long>(w.b) * f.num_heads_q + h) * f.seqlen_q + row,
                QuerySums<C>::of_head(p, w.b, h) + row * C::kHeadDim};
  };
  auto next = [&](const Rows& at) {
    if (at.i == w.row_first) return last_of(at.h + 1);
    return Rows{at.h,
                at.i - 1,
                at.q - C::kBlockM * f.q_stride_seq,
                at.dout - C::kBlockM * p.dout_stride_seq,
                at.vector - C::kBlockM,
                at.sums - C::kBlockM * C::kHeadDim};
  };
  auto load = [&](auto tail, int stage, const Rows& at) {
    constexpr bool kTail = decltype(tail)::value;
    constexpr bool kByElement = C::kUnaligned || !kSame<Element, typename C::Out>;
    const int valid = w.s.used_q - at.i * C::kBlockM;
    load_tile<typename M::TileQ, kThreads, kTail, C::kUnaligned>(smem.q[stage], at.q, f.q_stride_seq, valid, f.head_dim);
    if constexpr (kByElement) {
      load_elements<Element, typename M::TileO, kThreads, kTail>(smem.dout[stage], at.dout, p.dout_stride_seq, p.dout_stride_dim, valid,
                                                                 f.head_dim_v);
    } else {
      load_tile<typename M::TileO, kThreads, kTail, false>(smem.dout[stage], at.dout, p.dout_stride_seq, valid, f.head_dim_v);
    }
    load_vector<C::kBlockM, kThreads, kTail>(smem.reference[stage], p.row_reference + at.vector, valid);
    load_vector<C::kBlockM, kThreads, kTail>(smem.delta[stage], static_cast<const float*>(p.row_delta) + at.vector, valid);
    cp_async_commit();
  };
  auto load_rows = [&](int stage, const Rows& at) {
    if ((at.i + 1) * C::kBlockM <= w.s.used_q) {
      load(Constant<false>{}, stage, at);
    } else {
      load(Constant<true>{}, stage, at);
    }
  };
  const int blocks = group * (w.row_last - w.row_first);

  float rdK[kTilesK][2 * ColumnsK::kCount][4] = {};
  float rdV[kTilesK][2 * ColumnsV::kCount][4] = {};
  if (blocks > 0) {
    const auto* gK = static_cast<const Element*>(f.k) + w.b * f.k_stride_batch + w.h_kv * f.k_stride_head + w.key * f.k_stride_seq;
    const auto* gV = static_cast<const Element*>(f.v) + w.b * f.v_stride_batch + w.h_kv * f.v_stride_head + w.key * f.v_stride_seq;
    const int valid = w.s.used_k - w.key;
    load_tile<typename M::TileK, kThreads, true, C::kUnaligned>(smem.k, gK, f.k_stride_seq, valid, f.head_dim);
    load_tile<typename M::TileV, kThreads, true, C::kUnaligned>(smem.v, gV, f.v_stride_seq, valid, f.head_dim_v);
    load_rows(0, last_of(w.h_kv * group));
  }

  Rows at = last_of(w.h_kv * group);
  for (int n = 0; n < blocks; ++n) {
    const int stage = n % C::kStages;
    const Rows following = next(at);
    cp_async_wait<0>();
    __syncthreads();  // block n has arrived for all threads, and all have done with the other buffers, and with P and dS
    if (C::kStages == 2 && n + 1 < blocks) load_rows((n + 1) % 2, following);
    const char *sQ = smem.q[stage], *sdO = smem.dout[stage];

    RowVectors<kTilesS> rows;
    read_vectors(rows, smem.reference[stage] + row_s, smem.delta[stage] + row_s);
    float rS[kTilesS][kKeysS / 8][4], rdP[kTilesS][kKeysS / 8][4];
    multiply_qk<Element, typename M::TileQ, typename M::TileK, kTilesS, kKeysS, C::kHeadDim>(rS, sQ, smem.k, row_s, key_s);
    multiply_qk<Element, typename M::TileO, typename M::TileV, kTilesS, kKeysS, C::kHeadDimV>(rdP, sdO, smem.v, row_s, key_s,
                                                                                              rows.minus_delta);
    auto step = [&](auto masked) {
      gradient_step<C, decltype(masked)::value, kTilesS, kKeysS>(f, score_context<C>(f, w.b, at.h), w.s, at.i * C::kBlockM + row_s,
                                                                 w.key + key_s, rS, rdP, rows, [](auto...) {});
    };
    if (w.is_full(at.i)) {
      step(Constant<false>{});
    } else {
      step(Constant<true>{});
    }
    store_tile<C, typename M::TileP, kTilesS, kKeysS>(smem.p, rS, row_s, key_s);
    store_tile<C, typename M::TileP, kTilesS, kKeysS>(smem.ds, rdP, row_s, key_s);
    __syncthreads();  // P and dS are there

    add_ab<Element, typename M::TileP, typename M::TileO, true, kTilesK, C::kBlockM, C::kHeadDimV, kWarpsD>(rdV, smem.p, sdO, key_k,
                                                                                                            part_k);
    add_ab<Element, typename M::TileP, typename M::TileQ, true, kTilesK, C::kBlockM, C::kHeadDim, kWarpsD>(rdK, smem.ds, sQ, key_k, part_k);
    if constexpr (C::kSumQ) {
      float rdQ[kTilesQ][2 * ColumnsQ::kCount][4] = {};
      add_ab<Element, typename M::TileP, typename M::TileK, false, kTilesQ, C::kBlockN, C::kHeadDim, kWarpsE>(rdQ, smem.ds, smem.k, row_q,
                                                                                                              part_q);
      float* g = QuerySums<C>::at(at.sums, row_q / 16, 2 * part_q);
#pragma unroll
      for (int m = 0; m < kTilesQ; ++m) {
        if (at.i * C::kBlockM + row_q + 16 * m >= f.seqlen_q) break;
#pragma unroll
        for (int c = 0; c < 2 * ColumnsQ::kCount; ++c) {
          if (ColumnsQ::exists(part_q, c / 2))
            QuerySums<C>::add(g + (m * (C::kHeadDim / 8) + c / 2 * 2 * kWarpsE + c % 2) * 128, rdQ[m][c]);
        }
      }
    }
    if (C::kStages == 1 && n + 1 < blocks) {
      __syncthreads();  // all have done with Q and dO
      load_rows(0, following);
    }
    at = following;
  }

  auto* again = reinterpret_cast<unsigned*>(smem.p);  // 16 bits for each 16 keys: those to be computed again
  __syncthreads();                                    // all have done with P
  if (threadIdx.x < C::kBlockN / 16) again[threadIdx.x] = 0;
  __syncthreads();  // zero for all
#pragma unroll
  for (int m = 0; m < kTilesK; ++m) {
    const unsigned bad = not_finite(rdK[m]) | not_finite(rdV[m]);
    if (bad != 0 && threadIdx.x % 32 == 0) atomicOr(&again[key_k / 16 + m], bad);
  }
  const int key = w.key + key_k, count = f.seqlen_k - key;
  if (p.dk) {
    auto* g = static_cast<Element*>(p.dk) + w.b * p.dk_stride_batch + w.h_kv * p.dk_stride_head + key * p.dk_stride_seq;
    const float scale = static_cast<float>(f.softmax_scale);
    store_gradient<C::kUnaligned, C::kHeadDim, kWarpsD, kTilesK>(g, p.dk_stride_seq, count, f.head_dim, rdK, scale, part_k);
  }
  if (p.dv) {
    auto* g = static_cast<Element*>(p.dv) + w.b * p.dv_stride_batch + w.h_kv * p.dv_stride_head + key * p.dv_stride_seq;
    store_gradient<C::kUnaligned, C::kHeadDimV, kWarpsD, kTilesK>(g, p.dv_stride_seq, count, f.head_dim_v, rdV, 1.0f, part_k);
  }
  __syncthreads();  // what was written of these keys is overwritten by other warps, which know now which they are
  for (int j = warp; j < C::kBlockN; j += C::kWarps) {
    const bool asked = again[j / 16] >> (j % 16) & 1 && w.key + j < f.seqlen_k;
    if (asked && !key_is_lost<C>(p, w.b, w.h_kv, w.key + j)) key_gradient<C>(p, w.b, w.h_kv, w.key + j);
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, Config::kBlocks)
    bwd_sm80(const __grid_constant__ cupyflash::BackwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::backward<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
