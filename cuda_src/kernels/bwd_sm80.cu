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

// What each warp has of the products: rows and columns of S and dP, keys and a part of the columns of dK and dV, rows and a part of dQ's.
template <class C>
struct Shares {
  static constexpr int kTilesS = C::kBlockM / C::kWarpsM / 16, kKeysS = C::kBlockN / (C::kWarps / C::kWarpsM);
  static constexpr int kTilesK = C::kBlockN / C::kWarpsN / 16, kPartsK = C::kWarps / C::kWarpsN;
  static constexpr int kTilesQ = C::kBlockM / C::kWarpsQ / 16, kPartsQ = C::kWarps / C::kWarpsQ;
  static_assert(kTilesS * 16 * C::kWarpsM == C::kBlockM && kKeysS % 16 == 0 && kKeysS * (C::kWarps / C::kWarpsM) == C::kBlockN);
  static_assert(kTilesK * 16 * C::kWarpsN == C::kBlockN && kTilesQ * 16 * C::kWarpsQ == C::kBlockM);
  using ColumnsK = Dealt<C::kHeadDim, kPartsK>;
  using ColumnsV = Dealt<C::kHeadDimV, kPartsK>;
  using ColumnsQ = Dealt<C::kHeadDim, kPartsQ>;

  int row_s, key_s, key_k, part_k, row_q, part_q;

  __device__ explicit Shares(int warp) {
    row_s = warp % C::kWarpsM * 16 * kTilesS;
    key_s = warp / C::kWarpsM * kKeysS;
    key_k = warp % C::kWarpsN * 16 * kTilesK;
    part_k = warp / C::kWarpsN;
    row_q = warp % C::kWarpsQ * 16 * kTilesQ;
    part_q = warp / C::kWarpsQ;
  }
};

// A row block of a query head, and where its rows lie.
template <class C>
struct Rows {
  int h, i;
  const typename C::Element* q;
  const typename C::Out* dout;
  long long vector;  // of row_reference and row_delta
  float* sums;       // of dQ

  // The last block that the keys meet, of head h.
  __device__ static Rows last_of(const BackwardParams& p, const KeyWork<C>& w, int h) {
    const ForwardParams& f = p.forward;
    const int i = w.row_last - 1;
    const long long first = static_cast<long long>(i) * C::kBlockM, row = rows_before<C>(w.s) + first;
    return {h,
            i,
            static_cast<const typename C::Element*>(f.q) + w.b * f.q_stride_batch + h * f.q_stride_head + row * f.q_stride_seq,
            static_cast<const typename C::Out*>(p.dout) + w.b * p.dout_stride_batch + h * p.dout_stride_head + row * p.dout_stride_seq,
            first_in_vector<C>(f, w.s, w.b, h) + first,
            QuerySums<C>::of_head(p, w.s, w.b, h) + first * C::kHeadDim};
  }
  __device__ Rows next(const BackwardParams& p, const KeyWork<C>& w) const {
    if (i == w.row_first) return last_of(p, w, h + 1);
    return {h,
            i - 1,
            q - C::kBlockM * p.forward.q_stride_seq,
            dout - C::kBlockM * p.dout_stride_seq,
            vector - C::kBlockM,
            sums - C::kBlockM * C::kHeadDim};
  }
};

template <class C, bool kTail>
__device__ inline void load_rows(const BackwardParams& p, Smem<C>& smem, int stage, const Rows<C>& rows, int valid) {
  using M = Smem<C>;
  using Element = typename C::Element;
  const ForwardParams& f = p.forward;
  constexpr int kThreads = 32 * C::kWarps;
  load_tile<typename M::TileQ, kThreads, kTail, C::kUnaligned>(smem.q[stage], rows.q, f.q_stride_seq, valid, f.head_dim);
  if constexpr (C::kUnaligned || !kSame<Element, typename C::Out>) {
    load_elements<Element, typename M::TileO, kThreads, kTail>(smem.dout[stage], rows.dout, p.dout_stride_seq, p.dout_stride_dim, valid,
                                                               f.head_dim_v);
  } else {
    load_tile<typename M::TileO, kThreads, kTail, false>(smem.dout[stage], rows.dout, p.dout_stride_seq, valid, f.head_dim_v);
  }
  load_vector<C::kBlockM, kThreads, kTail>(smem.reference[stage], p.row_reference + rows.vector, valid);
  load_vector<C::kBlockM, kThreads, kTail>(smem.delta[stage], static_cast<const float*>(p.row_delta) + rows.vector, valid);
}

// dQ = dS K of a block of rows, added to its sums.
template <class C>
__device__ inline void add_dq(const BackwardParams& p, const Smem<C>& smem, const KeyWork<C>& w, const Rows<C>& rows,
                              const Shares<C>& share) {
  using M = Smem<C>;
  using S = Shares<C>;
  float rdQ[S::kTilesQ][2 * S::ColumnsQ::kCount][4] = {};
  add_ab<typename C::Element, typename M::TileP, typename M::TileK, false, S::kTilesQ, C::kBlockN, C::kHeadDim, S::kPartsQ>(
      rdQ, smem.ds, smem.k, share.row_q, share.part_q);
  float* g = QuerySums<C>::at(rows.sums, share.row_q / 16, 2 * share.part_q);
#pragma unroll
  for (int m = 0; m < S::kTilesQ; ++m) {
    if (rows.i * C::kBlockM + share.row_q + 16 * m >= rows_of<C>(p.forward, w.s)) break;
#pragma unroll
    for (int n = 0; n < 2 * S::ColumnsQ::kCount; ++n) {
      if (!S::ColumnsQ::exists(share.part_q, n / 2)) break;
      QuerySums<C>::add(g + (m * (C::kHeadDim / 8) + n / 2 * 2 * S::kPartsQ + n % 2) * 128, rdQ[m][n]);
    }
  }
}

// dK and dV go to memory; keys that left the range of the tiles are computed again.
template <class C, class S = Shares<C>>
__device__ inline void finish_keys(const BackwardParams& p, Smem<C>& smem, const KeyWork<C>& w,
                                   const float (&rdK)[S::kTilesK][2 * S::ColumnsK::kCount][4],
                                   const float (&rdV)[S::kTilesK][2 * S::ColumnsV::kCount][4]) {
  using Element = typename C::Element;
  const ForwardParams& f = p.forward;
  const int thread = opaque(threadIdx.x), warp = thread / 32;  // not to be kept through the loop before
  const S share(warp);
  auto* again = reinterpret_cast<unsigned*>(smem.p);  // 16 bits for each 16 keys: those to be computed again
  __syncthreads();                                    // all have done with P
  if (thread < C::kBlockN / 16) again[thread] = 0;
  __syncthreads();  // zero for all
#pragma unroll
  for (int m = 0; m < S::kTilesK; ++m) {
    const unsigned bad = not_finite(rdK[m]) | not_finite(rdV[m]);
    if (bad != 0 && thread % 32 == 0) atomicOr(&again[share.key_k / 16 + m], bad);
  }
  const int inside = w.key + share.key_k, count = keys_of<C>(f, w.s) - inside;
  const long long key = keys_before<C>(w.s) + inside;
  if (p.dk) {
    auto* g = static_cast<Element*>(p.dk) + w.b * p.dk_stride_batch + w.h_kv * p.dk_stride_head + key * p.dk_stride_seq;
    const float scale = static_cast<float>(f.softmax_scale);
    store_gradient<C::kUnaligned, C::kHeadDim, S::kPartsK, S::kTilesK>(g, p.dk_stride_seq, count, f.head_dim, rdK, scale, share.part_k);
  }
  if (p.dv) {
    auto* g = static_cast<Element*>(p.dv) + w.b * p.dv_stride_batch + w.h_kv * p.dv_stride_head + key * p.dv_stride_seq;
    store_gradient<C::kUnaligned, C::kHeadDimV, S::kPartsK, S::kTilesK>(g, p.dv_stride_seq, count, f.head_dim_v, rdV, 1.0f, share.part_k);
  }
  __syncthreads();  // what was written of these keys is overwritten by other warps, which know now which they are
  for (int j = warp; j < C::kBlockN; j += C::kWarps) {
    const bool asked = again[j / 16] >> (j % 16) & 1 && w.key + j < keys_of<C>(f, w.s);
    if (asked && !key_is_lost<C>(p, w.b, w.h_kv, w.key + j)) key_gradient<C>(p, w.b, w.h_kv, w.key + j);
  }
}

template <class C>
__device__ inline KeyWork<C> work_of(const ForwardParams& f, int block) {
  if constexpr (C::kPacked) {
    const ListedTile tile = static_cast<const TileList*>(f.key_tiles)->tiles[block];
    return {f, tile.b(f.num_heads_kv), tile.h(f.num_heads_kv), tile.first / C::kBlockN, tile.sequence(f)};
  } else {
    const int key_blocks = (f.seqlen_k + C::kBlockN - 1) / C::kBlockN;
    return {f, block / key_blocks, block % key_blocks};
  }
}

template <class C>
__device__ inline void backward(const BackwardParams& p, Smem<C>& smem) {
  using Element = typename C::Element;
  using M = Smem<C>;
  using S = Shares<C>;
  const ForwardParams& f = p.forward;
  constexpr int kThreads = 32 * C::kWarps;
  if constexpr (C::kPacked) {
    if (blockIdx.x >= static_cast<const TileList*>(f.key_tiles)->count) return;
  }
  const KeyWork<C> w = work_of<C>(f, blockIdx.x);
  const S share(threadIdx.x / 32);
  const int group = f.num_heads_q / f.num_heads_kv;
  const int blocks = group * (w.row_last - w.row_first);  // of rows, of all query heads

  auto load = [&](int stage, const Rows<C>& rows) {
    const int valid = w.s.used_q - rows.i * C::kBlockM;
    if (valid >= C::kBlockM) {
      load_rows<C, false>(p, smem, stage, rows, valid);
    } else {
      load_rows<C, true>(p, smem, stage, rows, valid);
    }
    cp_async_commit();
  };

  float rdK[S::kTilesK][2 * S::ColumnsK::kCount][4] = {};
  float rdV[S::kTilesK][2 * S::ColumnsV::kCount][4] = {};
  Rows<C> rows = Rows<C>::last_of(p, w, w.h_kv * group);
  if (blocks > 0) {
    const long long key = keys_before<C>(w.s) + w.key;
    const auto* gK = static_cast<const Element*>(f.k) + w.b * f.k_stride_batch + w.h_kv * f.k_stride_head + key * f.k_stride_seq;
    const auto* gV = static_cast<const Element*>(f.v) + w.b * f.v_stride_batch + w.h_kv * f.v_stride_head + key * f.v_stride_seq;
    const int valid = w.s.used_k - w.key;
    load_tile<typename M::TileK, kThreads, true, C::kUnaligned>(smem.k, gK, f.k_stride_seq, valid, f.head_dim);
    load_tile<typename M::TileV, kThreads, true, C::kUnaligned>(smem.v, gV, f.v_stride_seq, valid, f.head_dim_v);
    load(0, rows);
  }
  for (int n = 0; n < blocks; ++n) {
    const int stage = n % C::kStages;
    const Rows<C> following = rows.next(p, w);
    cp_async_wait<0>();
    __syncthreads();  // block n has arrived for all threads, and all have done with the other buffers, and with P and dS
    if (C::kStages == 2 && n + 1 < blocks) load((n + 1) % 2, following);
    const char *sQ = smem.q[stage], *sdO = smem.dout[stage];

    RowVectors<S::kTilesS> vectors;
    read_vectors(vectors, smem.reference[stage] + share.row_s, smem.delta[stage] + share.row_s);
    float rS[S::kTilesS][S::kKeysS / 8][4], rdP[S::kTilesS][S::kKeysS / 8][4];
    multiply_qk<Element, typename M::TileQ, typename M::TileK, S::kTilesS, S::kKeysS, C::kHeadDim>(rS, sQ, smem.k, share.row_s,
                                                                                                   share.key_s);
    multiply_qk<Element, typename M::TileO, typename M::TileV, S::kTilesS, S::kKeysS, C::kHeadDimV>(rdP, sdO, smem.v, share.row_s,
                                                                                                    share.key_s, vectors.minus_delta);
    auto step = [&](auto masked) {
      gradient_step<C, decltype(masked)::value, S::kTilesS, S::kKeysS>(f, score_context<C>(f, w.b, rows.h), w.s,
                                                                       rows.i * C::kBlockM + share.row_s, w.key + share.key_s, rS, rdP,
                                                                       vectors, [](auto...) {});
    };
    if (w.is_full(rows.i)) {
      step(Constant<false>{});
    } else {
      step(Constant<true>{});
    }
    store_tile<C, typename M::TileP, S::kTilesS, S::kKeysS>(smem.p, rS, share.row_s, share.key_s);
    store_tile<C, typename M::TileP, S::kTilesS, S::kKeysS>(smem.ds, rdP, share.row_s, share.key_s);
    __syncthreads();  // P and dS are there

    // dV += P^T dO, dK += dS^T Q
    add_ab<Element, typename M::TileP, typename M::TileO, true, S::kTilesK, C::kBlockM, C::kHeadDimV, S::kPartsK>(
        rdV, smem.p, sdO, share.key_k, share.part_k);
    add_ab<Element, typename M::TileP, typename M::TileQ, true, S::kTilesK, C::kBlockM, C::kHeadDim, S::kPartsK>(rdK, smem.ds, sQ,
                                                                                                                 share.key_k, share.part_k);
    if constexpr (C::kSumQ) add_dq<C>(p, smem, w, rows, share);
    if (C::kStages == 1 && n + 1 < blocks) {
      __syncthreads();  // all have done with Q and dO
      load(0, following);
    }
    rows = following;
  }
  finish_keys<C>(p, smem, work_of<C>(f, opaque(blockIdx.x)), rdK, rdV);
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, Config::kBlocks)
    bwd_sm80(const __grid_constant__ cupyflash::BackwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::backward<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
