// bwd_sm90.cu: dK, dV and the sums of dQ, by the tensor memory accelerator and wgmma, for fp16 and bf16 on sm_90a. Read it after
// fwd_sm90.cu and bwd_sm80.cu; bwd_delta.cu has run before it, bwd_convert.cu runs after it.
//
// Algorithm  FlashAttention-3's backward (arXiv 2407.08608, appendix B): a block of keys stays, the blocks of rows pass by. S^T = K Q^T and
//            dP^T = V dO^T have the keys as rows, so that P^T and dS^T are the left operands of dV and dK where they are, in registers.
//            Only dS goes through shared memory, for dQ = dS K.
// Work       A tile is kBlockN keys of one key head: all query heads that read it, one after another, so no sum over them is left. There is
//            a block for each SM, which asks for tile after tile. Where all are as long, those of the last round are dealt out in parts of
//            their rows (kSplits, plan._splits), and the block that comes last adds up dK and dV of the parts.
// Walk       Row blocks upwards from the first that sees a key, of each query head.
// Threads    Warpgroup 0 copies: a thread finds and queues the tiles, a warp fetches LSE and delta, and two threads queue the sums of dQ.
//            The other two have 64 keys each of S, dP, dK and dV; of dQ each has half: of the columns, or of the rows of a block of 128.
// Turns      The two multiply S and dP when they like, but dV, dQ and dK in turn, so that the exponentials of one lie under the products of
//            the other. dQ needs dS of both, so it is that of the row block before, and of the last one when the walk is over: nobody waits
//            for the other's dS. From 1k on 1.13 to 1.17 times cuDNN at D = 128, 1.17 to 1.25 under a causal mask, 1.18 to 1.37 at D = 64.
// Smem       K and V, twice for short walks; kStages tiles of Q and of dO with their vectors; dS twice or three times.
// dQ         Leaves through shared memory, from where the accelerator adds it to dq_sum, in no fixed order; bwd_convert makes dQ of it.
// Edges      Rows past Sq are zeros with LSE = +inf: P = 0. Keys past their used length are masked.
// Way out    As bwd_sm80: a key whose dK or dV is not finite is computed again by key_gradient.
#include "../primitives/bwd_sm90.cuh"

namespace cupyflash {

// Of dQ each warpgroup has 64 rows, or 64 of 128 columns where a block has 64 rows; a warp 16 rows of them.
template <class C>
struct QueryTiles {
  static constexpr bool kByRows = C::kBlockM == 128;
  static constexpr int kWidth = kByRows ? C::kHeadDim : 64, kCount = kWidth / 8;
  static_assert(C::kBlockN == 128 && (kByRows ? C::kHeadDim <= 64 : C::kBlockM == 64 && C::kHeadDim == 128 && C::kPanels));
};

template <class C>
struct Smem {
  using TileK = Panels<C::kBlockN, C::kHeadDim>;
  using TileV = Panels<C::kBlockN, C::kHeadDimV>;
  using TileQ = Panels<C::kBlockM, C::kHeadDim>;
  using TileO = Panels<C::kBlockM, C::kHeadDimV>;
  using TileS = Panels<C::kBlockM, C::kBlockN>;
  alignas(1024) char k[C::kKeyBuffers][TileK::kBytes];
  alignas(1024) char v[C::kKeyBuffers][TileV::kBytes];
  alignas(1024) char q[C::kStages][TileQ::kBytes];
  alignas(1024) char dout[C::kStages][TileO::kBytes];
  // Rows are query rows. A warpgroup may write over what both have read: before its turn that is of three row blocks ago, or of two for the
  // second one, which comes after the other; in its turn of two.
  static constexpr int kTilesS = C::kKeyBuffers == 1 ? 3 : 2;
  alignas(1024) char ds[kTilesS][TileS::kBytes];
  float4 dq[2][4][QueryTiles<C>::kCount][32];  // of the warps of two warpgroups, as their lanes hold it
  alignas(16) float reference[C::kStages][C::kBlockM];
  float delta[C::kStages][C::kBlockM];
  alignas(8) unsigned long long keys_full[C::kKeyBuffers], keys_empty[C::kKeyBuffers];
  unsigned long long q_full[C::kStages], q_empty[C::kStages], dout_full[C::kStages], dout_empty[C::kStages];
  unsigned long long dq_full[2], dq_empty[2];
  float* dq_to[2];  // where dq is added; null: there is no more
  int came;
  TilesInTurn<C> tiles;
  RawBarriers<C::kStages, C::kPacked> tails;
};

// Scope: the warpgroup that copies.
template <class C>
__device__ inline void produce(const BackwardParams& p, const TensorMaps& maps, Smem<C>& smem) {
  if (threadIdx.x == 0) {
    copy_tiles<C>(p, maps, smem);
  } else if (threadIdx.x / 32 == 1) {
    copy_vectors_of_tiles<C>(p, smem);
  } else if (threadIdx.x % 32 == 0) {
    const int g = threadIdx.x / 32 - 2;
    for (int n = 0;; ++n) {
      mbarrier_wait(smem_address(&smem.dq_full[g]), n % 2);
      float* const sums = smem.dq_to[g];
      if (!sums) return;
      bulk_add(sums, smem_address(&smem.dq[g]), sizeof(smem.dq[g]));
      bulk_commit();
      bulk_wait_read();
      mbarrier_arrive(smem_address(&smem.dq_empty[g]));
    }
  }
}

// Scope: warpgroup. Leaves its part of dQ of a row block to the thread that has it added to the sums, 16 kB at once (512 bytes at a time
// took 20 % longer in all). `added` counts these since the kernel began.
template <class C>
__device__ inline void add_rows(const BackwardParams& p, Smem<C>& smem, const float (&rdQ)[QueryTiles<C>::kCount][4], const KeyShare<C>& w,
                                int h, int row, int g, int& added) {
  using Tiles = QueryTiles<C>;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, first = row + (Tiles::kByRows ? 64 * g : 0);
  if (first >= rows_of<C>(p.forward, w.s)) return;
  mbarrier_wait(smem_address(&smem.dq_empty[g]), added % 2 ^ 1);
  ++added;
#pragma unroll
  for (int c = 0; c < Tiles::kCount; ++c) smem.dq[g][warp][c][lane] = float4{rdQ[c][0], rdQ[c][1], rdQ[c][2], rdQ[c][3]};
  if (threadIdx.x % 128 == 0) {
    smem.dq_to[g] = QuerySums<C>::tile(QuerySums<C>::of_head(p, w.s, w.b, h), first / 16, Tiles::kByRows ? 0 : 8 * g);
  }
  fence_async_proxy();
  __syncwarp();  // one lane says that all have written
  release(smem.dq_full[g]);
}

// Scope: the warpgroups that multiply. One tile, whose keys are in buffer `keys`; n counts row blocks since the kernel began.
template <class C>
__device__ inline int multiply(const BackwardParams& p, Smem<C>& smem, const KeyShare<C>& w, int keys, int n, int& added) {
  using Element = typename C::Element;
  using M = Smem<C>;
  using Tiles = QueryTiles<C>;
  constexpr bool kByRows = Tiles::kByRows;
  const ForwardParams& f = p.forward;
  const int g = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int key = w.key + 64 * g + 16 * warp;  // the warp's first
  const unsigned sK = smem_address(smem.k[keys]), own_k = sK + g * 64 * 128, own_v = smem_address(smem.v[keys]) + g * 64 * 128;
  // Where the warp's 16 keys of a row of dS lie, for stmatrix: 8 rows by 8 keys from each 8 lanes.
  const unsigned ds_place = g * M::TileS::kPanelBytes + (lane % 8 + lane / 16 * 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;

  auto ds = [&](int n) { return smem_address(smem.ds[n % M::kTilesS]); };

  float rdK[1][C::kHeadDim / 8][4] = {};
  float rdV[1][C::kHeadDimV / 8][4] = {};
  float rdQ[1][Tiles::kCount][4];
  auto multiply_dq = [&](int n) {
    wgmma_fence();
    issue_dq<Element, C::kBlockM, C::kBlockN, Tiles::kWidth>(rdQ, ds(n) + (kByRows ? g * 64 * 128 : 0),
                                                             sK + (kByRows ? 0 : g * M::TileK::kPanelBytes));
    wgmma_commit();
  };
  auto turn = [&] { named_barrier_sync(1 + g, 256); };
  auto end_turn = [&] { named_barrier_arrive(1 + (g ^ 1), 256); };
  const int begin = n;
  int row_before = 0, head_before = 0;
  for (RowBlocks<C> rows(f, w); rows.left > 0; ++n, rows.next(w)) {
    const int stage = n % C::kStages, parity = n / C::kStages % 2;
    const unsigned sQ = smem_address(smem.q[stage]), sdO = smem_address(smem.dout[stage]);
    const int row = rows.i * C::kBlockM;
    float rS[1][C::kBlockM / 8][4], rdP[1][C::kBlockM / 8][4];
    mbarrier_wait(smem_address(&smem.q_full[stage]), parity);
    wgmma_fence();
    issue_qk<Element, C::kBlockN, C::kBlockM, C::kHeadDim>(rS, own_k, sQ);
    wgmma_commit();
    mbarrier_wait(smem_address(&smem.dout_full[stage]), parity);
    wgmma_fence();
    issue_qk<Element, C::kBlockN, C::kBlockM, C::kHeadDimV>(rdP, own_v, sdO);
    wgmma_commit();
    wgmma_wait<1>();
    const ColumnVector<C> reference(smem.reference[stage]);
    if (w.is_full(rows.i)) {
      weights_step<C, false>(f, w.s, key, row, rS, reference);
    } else {
      weights_step<C, true>(f, w.s, key, row, rS, reference);
    }
    wgmma_wait<0>();
    const ColumnVector<C> delta(smem.delta[stage]);
#pragma unroll
    for (int t = 0; t < C::kBlockM / 8; ++t) {
      const float2 of = delta.r[t];
#pragma unroll
      for (int e = 0; e < 4; ++e) rdP[0][t][e] = rS[0][t][e] * (rdP[0][t][e] - (e % 2 ? of.y : of.x));
    }
    unsigned rP[C::kBlockM / 16][4], rdS[C::kBlockM / 16][4];
    pack_left<Element>(rP, rS);
    pack_left<Element>(rdS, rdP);
    auto store_ds = [&] {
#pragma unroll
      for (int t = 0; t < C::kBlockM / 16; ++t) stmatrix_x4_trans(ds(n) + ds_place + t * 16 * 128, rdS[t]);
    };
    // In the turn, ptxas would put off to it what makes dS as well: 6 % at D = 64.
    const bool stores_before = M::kTilesS == 3 || g == 1;
    if (stores_before) store_ds();
    turn();
    wgmma_fence();
    issue_pv<Element, C::kBlockM, C::kHeadDimV>(rdV, rP, sdO, 1);
    wgmma_commit();
    if (!stores_before) store_ds();
    multiply_dq(n + M::kTilesS - 1);  // the row block before; the first time of a tile nothing that is looked at
    wgmma_fence();
    issue_pv<Element, C::kBlockM, C::kHeadDim>(rdK, rdS, sQ, 1);
    wgmma_commit();
    fence_async_proxy();  // waits for dS to be there, under the products
    wgmma_wait<1>();
    end_turn();
    if (n > begin) add_rows<C>(p, smem, rdQ[0], w, head_before, row_before, g, added);
    row_before = uniform(row);
    head_before = uniform(rows.h);
    wgmma_wait<0>();
    release(smem.dout_empty[stage]);
    release(smem.q_empty[stage]);
  }
  if (n > begin) {
    turn();
    multiply_dq(n - 1);
  }
  wgmma_wait<0>();
  release(smem.keys_empty[keys]);
  if (n > begin) {
    end_turn();
    add_rows<C>(p, smem, rdQ[0], w, head_before, row_before, g, added);
  }

  if constexpr (C::kSplits) {
    if (w.parts > 1) {
      const PartSums<C> sums(p, w);
      sums.leave(rdK[0], w.part, 0);
      sums.leave(rdV[0], w.part, C::kHeadDim / 8);
      if (!comes_last(p, w, 3, smem.came)) return n;
      sums.sum(rdK[0], 0);
      sums.sum(rdV[0], C::kHeadDim / 8);
    }
  }
  const int count = keys_of<C>(f, w.s) - key;
  const long long out_key = keys_before<C>(w.s) + key;
  if (p.dk) {
    auto* out = static_cast<Element*>(p.dk) + w.b * p.dk_stride_batch + w.h_kv * p.dk_stride_head + out_key * p.dk_stride_seq;
    store_chunks<C::kHeadDim>(out, p.dk_stride_seq, count, f.head_dim, rdK[0], static_cast<float>(f.softmax_scale));
  }
  if (p.dv) {
    auto* out = static_cast<Element*>(p.dv) + w.b * p.dv_stride_batch + w.h_kv * p.dv_stride_head + out_key * p.dv_stride_seq;
    store_chunks<C::kHeadDimV>(out, p.dv_stride_seq, count, f.head_dim_v, rdV[0], 1.0f);
  }
  __syncwarp();  // what was written of these keys is overwritten by other lanes
  for (unsigned again = uniform(not_finite(rdK[0]) | not_finite(rdV[0])); again; again &= again - 1) {
    const int j = uniform(key + __ffs(again) - 1);
    if (j < keys_of<C>(f, w.s) && !uniform(key_is_lost<C>(p, w.b, w.h_kv, j))) key_gradient<C>(p, w.b, w.h_kv, j);
  }
  return n;
}

template <class C>
__device__ inline void consume(const BackwardParams& p, Smem<C>& smem) {
  const int g = uniform(threadIdx.x / 128) - 1;
  int n = 0, added = 0;
  if (g == 1) named_barrier_arrive(1, 256);  // the first turn is the other's
  for (int t = 0;; ++t) {
    const int buffer = uniform(t % C::kKeyBuffers);
    const KeyShare<C> w = next_tile<C>(smem, buffer, t / C::kKeyBuffers % 2, 7);
    if (w.parts == 0) break;
    n = multiply<C>(p, smem, w, buffer, uniform(n), added);
  }
  if (g == 0) named_barrier_sync(1, 256);  // nobody is to be waited for when the block ends
  mbarrier_wait(smem_address(&smem.dq_empty[g]), added % 2 ^ 1);
  if (threadIdx.x % 128 == 0) smem.dq_to[g] = nullptr;
  release(smem.dq_full[g]);
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(384, 1)
    bwd_sm90(const __grid_constant__ cupyflash::BackwardParams p, const __grid_constant__ cupyflash::TensorMaps maps) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  cupyflash::backward<Config>(p, maps, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
