// bwd_sm90_wide.cu: dK, dV and the sums of dQ for wide heads, by the tensor memory accelerator and wgmma, for fp16 and bf16 on sm_90a. Read
// it after bwd_sm90.cu: here one warpgroup has no registers for both dK and dV of its keys, so what differs is who multiplies what.
//
// Work       A tile is 64 keys of one key head. Its walk, the copies, and the blocks that ask for tile after tile are those of bwd_sm90.
// Threads    Warpgroup 0 copies. Warpgroup 1 has S^T = K Q^T, P^T and dV += P^T dO, warpgroup 2 dP^T = V dO^T, dS^T and dK += dS^T Q; a
//            thread of either holds the same elements of a tile. Of dQ = dS K each computes some panels of 64 columns, one at a time.
// Overlap    S and dP of the next row block are queued behind dV and dK of this one, and the last panel of dQ runs under the exponentials
//            and dS of the next: where one warpgroup computes, the tensor cores have products of the other, mostly of both.
// Exchange   P^T goes through shared memory in float; dS is there twice. Of two barriers a row block, kWeightsReady holds up warpgroup 2
//            alone and kScoresReady warpgroup 1 alone. They come by turns, so they also say when a buffer may be written again: P when the
//            second has read it, which then arrives at kScoresReady; a dS when both have waited for the products that read it, which the
//            first has when it arrives at kWeightsReady two row blocks later.
// Smem       sK, sV; kStages tiles of Q and of dO with their vectors; P, dS twice.
// dQ, edges and way out are those of bwd_sm90.
#include "../primitives/bwd_sm90.cuh"

namespace cupyflash {

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
  alignas(1024) char ds[2][TileS::kBytes];  // rows are query rows
  float4 weights[C::kBlockM / 8][128];      // P^T as the threads hold it: of each 8 query rows, a thread's four elements
  alignas(16) float reference[C::kStages][C::kBlockM];
  float delta[C::kStages][C::kBlockM];
  alignas(8) unsigned long long keys_full[C::kKeyBuffers],
      keys_empty[C::kKeyBuffers], q_full[C::kStages], q_empty[C::kStages], dout_full[C::kStages], dout_empty[C::kStages];
  TilesInTurn<C> tiles;
  RawBarriers<C::kStages, C::kPacked> tails;
};

enum { kWeightsReady = 1, kScoresReady, kScoresWritten, kAllStored, kKeysZeroed };  // named barriers

// The warp's first key; not to be kept through the loop before.
template <class C>
__device__ inline int first_key(const KeyWork<C>& w) {
  return w.key + opaque(threadIdx.x) / 32 % 4 * 16;
}

// A warpgroup's share of dQ: panels kFirst to kLast. The last one stays queued until the next row block.
template <class C, int kFirst, int kLast>
struct QueryShare {
  static_assert(kLast - kFirst == 0 || kLast - kFirst == 1);
  float rdQ[1][8][4];
  float* sums = nullptr;  // those of the warp's rows, if there are such rows

  template <int kPanel>
  __device__ void issue(const Smem<C>& smem, int n) {
    const unsigned panel = smem_address(smem.k[0]) + kPanel * Smem<C>::TileK::kPanelBytes;
    wgmma_fence();
    issue_dq<typename C::Element, C::kBlockM, C::kBlockN, 64>(rdQ, smem_address(smem.ds[n % 2]), panel);
    wgmma_commit();
  }
  template <int kPanel>
  __device__ void add() {
    if (sums == nullptr) return;
#pragma unroll
    for (int c = 0; c < 8 && 8 * kPanel + c < QuerySums<C>::kColumns; ++c) QuerySums<C>::add(sums + (8 * kPanel + c) * 128, rdQ[0][c]);
  }
  // Behind the products of a row block, the last of which to read a tile give it back to `empty`.
  __device__ void issue_all(const Smem<C>& smem, int n, unsigned long long& empty) {
    issue<kFirst>(smem, n);
    wgmma_wait<1>();
    release(empty);
    if constexpr (kLast > kFirst) {
      wgmma_wait<0>();
      add<kFirst>();
      issue<kLast>(smem, n);
    }
  }
  // When it is there.
  __device__ void add_last() { add<kLast>(); }
  // Before the first row block, so that it waits as the others do: a product of nothing, which is not looked at.
  __device__ void issue_none(const Smem<C>& smem) { issue<kLast>(smem, 1); }
};

// dV, and P^T for the other warpgroup; n counts row blocks since the kernel began. Returns which of the warp's keys are not finite.
template <class C>
__device__ inline unsigned value_gradients(const BackwardParams& p, Smem<C>& smem, const KeyShare<C>& w, int n) {
  using Element = typename C::Element;
  const ForwardParams& f = p.forward;
  const int thread = threadIdx.x % 128, warp = thread / 32;
  const unsigned sK = smem_address(smem.k[0]);
  float rdV[1][C::kHeadDimV / 8][4] = {};
  float rS[1][C::kBlockM / 8][4];
  QueryShare<C, 0, Smem<C>::TileK::kCount / 2 - 1> share;
  RowBlocks<C> rows(f, w);
  if (rows.left > 0) mbarrier_wait(smem_address(&smem.q_full[n % C::kStages]), n / C::kStages % 2);
  wgmma_fence();
  issue_qk<Element, C::kBlockN, C::kBlockM, C::kHeadDim>(rS, sK, smem_address(smem.q[n % C::kStages]));
  wgmma_commit();
  share.issue_none(smem);
  wgmma_wait<1>();  // here as well as in the loop: else the products become serial (C7514)
  for (; rows.left > 0; ++n, rows.next(w)) {
    const int stage = n % C::kStages, parity = n / C::kStages % 2;
    const int next = rows.left > 1 ? n + 1 : n;  // the last row block is multiplied again, and not looked at
    const int row = rows.i * C::kBlockM, first = row + 16 * warp;
    const ColumnVector<C> reference(smem.reference[stage]);
    wgmma_wait<1>();  // S
    if (w.is_full(rows.i)) {
      weights_step<C, false>(f, w.s, w.key + 16 * warp, row, rS, reference);
    } else {
      weights_step<C, true>(f, w.s, w.key + 16 * warp, row, rS, reference);
    }
#pragma unroll
    for (int t = 0; t < C::kBlockM / 8; ++t) smem.weights[t][thread] = float4{rS[0][t][0], rS[0][t][1], rS[0][t][2], rS[0][t][3]};
    named_barrier_arrive(kWeightsReady, 256);
    unsigned rP[C::kBlockM / 16][4];
    pack_left<Element>(rP, rS);
    wgmma_wait<0>();  // the last panel of the row block before
    mbarrier_wait(smem_address(&smem.dout_full[stage]), parity);
    wgmma_fence();
    issue_pv<Element, C::kBlockM, C::kHeadDimV>(rdV, rP, smem_address(smem.dout[stage]), 1);
    wgmma_commit();
    mbarrier_wait(smem_address(&smem.q_full[next % C::kStages]), next / C::kStages % 2);
    wgmma_fence();
    issue_qk<Element, C::kBlockN, C::kBlockM, C::kHeadDim>(rS, opaque(sK), smem_address(smem.q[next % C::kStages]));
    wgmma_commit();
    release(smem.q_empty[stage]);
    share.add_last();
    share.sums = first < rows_of<C>(f, w.s) ? QuerySums<C>::at(QuerySums<C>::of_head(p, w.s, w.b, rows.h), first / 16, 0) : nullptr;
    named_barrier_sync(kScoresReady, 256);
    share.issue_all(smem, n, smem.dout_empty[stage]);
  }
  wgmma_wait<0>();
  release(smem.keys_empty[0]);
  share.add_last();
  if (p.dv) {
    const int key = first_key(w);
    auto* out =
        static_cast<Element*>(p.dv) + w.b * p.dv_stride_batch + w.h_kv * p.dv_stride_head + (keys_before<C>(w.s) + key) * p.dv_stride_seq;
    store_chunks<C::kHeadDimV>(out, p.dv_stride_seq, keys_of<C>(f, w.s) - key, f.head_dim_v, rdV[0], 1.0f);
  }
  return not_finite(rdV[0]);
}

// dK, and dS for both warpgroups. Returns which of the warp's keys are not finite.
template <class C>
__device__ inline unsigned key_gradients(const BackwardParams& p, Smem<C>& smem, const KeyShare<C>& w, int n) {
  using Element = typename C::Element;
  const ForwardParams& f = p.forward;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const unsigned sV = smem_address(smem.v[0]);
  // Where the warp's 16 keys of a row of dS lie, for stmatrix: 8 rows by 8 keys from each 8 lanes.
  const unsigned ds_place = (lane % 8 + lane / 16 * 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  float rdK[1][C::kHeadDim / 8][4] = {};
  float rdP[1][C::kBlockM / 8][4];
  QueryShare<C, Smem<C>::TileK::kCount / 2, Smem<C>::TileK::kCount - 1> share;
  RowBlocks<C> rows(f, w);
  if (rows.left > 0) mbarrier_wait(smem_address(&smem.dout_full[n % C::kStages]), n / C::kStages % 2);
  wgmma_fence();
  issue_qk<Element, C::kBlockN, C::kBlockM, C::kHeadDimV>(rdP, sV, smem_address(smem.dout[n % C::kStages]));
  wgmma_commit();
  share.issue_none(smem);
  wgmma_wait<1>();  // here as well as in the loop: else the products become serial (C7514)
  for (; rows.left > 0; ++n, rows.next(w)) {
    const int stage = n % C::kStages, parity = n / C::kStages % 2;
    const int next = rows.left > 1 ? n + 1 : n;  // the last row block is multiplied again, and not looked at
    const int first = rows.i * C::kBlockM + 16 * warp;
    mbarrier_wait(smem_address(&smem.q_full[stage]), parity);
    const ColumnVector<C> delta(smem.delta[stage]);
    wgmma_wait<1>();  // dP
    release(smem.dout_empty[stage]);
    named_barrier_sync(kWeightsReady, 256);
#pragma unroll
    for (int t = 0; t < C::kBlockM / 8; ++t) {
      const float4 weight = smem.weights[t][thread];
      const float2 of = delta.r[t];
      rdP[0][t][0] = weight.x * (rdP[0][t][0] - of.x);
      rdP[0][t][1] = weight.y * (rdP[0][t][1] - of.y);
      rdP[0][t][2] = weight.z * (rdP[0][t][2] - of.x);
      rdP[0][t][3] = weight.w * (rdP[0][t][3] - of.y);
    }
    unsigned rdS[C::kBlockM / 16][4];
    pack_left<Element>(rdS, rdP);
#pragma unroll
    for (int t = 0; t < C::kBlockM / 16; ++t) stmatrix_x4_trans(smem_address(smem.ds[n % 2]) + ds_place + t * 16 * 128, rdS[t]);
    fence_async_proxy();
    named_barrier_arrive(kScoresReady, 256);
    wgmma_wait<0>();  // the last panel of the row block before
    wgmma_fence();
    issue_pv<Element, C::kBlockM, C::kHeadDim>(rdK, rdS, smem_address(smem.q[stage]), 1);
    wgmma_commit();
    mbarrier_wait(smem_address(&smem.dout_full[next % C::kStages]), next / C::kStages % 2);
    wgmma_fence();
    issue_qk<Element, C::kBlockN, C::kBlockM, C::kHeadDimV>(rdP, opaque(sV), smem_address(smem.dout[next % C::kStages]));
    wgmma_commit();
    share.add_last();
    share.sums = first < rows_of<C>(f, w.s) ? QuerySums<C>::at(QuerySums<C>::of_head(p, w.s, w.b, rows.h), first / 16, 0) : nullptr;
    named_barrier_sync(kScoresWritten, 128);
    share.issue_all(smem, n, smem.q_empty[stage]);
  }
  wgmma_wait<0>();
  release(smem.keys_empty[0]);
  share.add_last();
  if (p.dk) {
    const int key = first_key(w);
    auto* out =
        static_cast<Element*>(p.dk) + w.b * p.dk_stride_batch + w.h_kv * p.dk_stride_head + (keys_before<C>(w.s) + key) * p.dk_stride_seq;
    store_chunks<C::kHeadDim>(out, p.dk_stride_seq, keys_of<C>(f, w.s) - key, f.head_dim, rdK[0], static_cast<float>(f.softmax_scale));
  }
  return not_finite(rdK[0]);
}

template <class C>
__device__ inline void produce(const BackwardParams& p, const TensorMaps& maps, Smem<C>& smem) {
  if (threadIdx.x == 0) {
    copy_tiles<C>(p, maps, smem);
  } else if (threadIdx.x / 32 == 1) {
    copy_vectors_of_tiles<C>(p, smem);
  }
}

template <class C>
__device__ inline void consume(const BackwardParams& p, Smem<C>& smem) {
  static_assert(C::kBlockM == 64 && C::kBlockN == 64 && C::kHeadDim > 64 && C::kKeyBuffers == 1);
  const bool first = uniform(threadIdx.x / 128) == 1;
  int n = 0;
  for (int t = 0;; ++t) {
    const KeyShare<C> w = next_tile<C>(smem, 0, t % 2, kKeysZeroed);
    if (w.parts == 0) break;
    n = uniform(n);
    unsigned again = first ? value_gradients<C>(p, smem, w, n) : key_gradients<C>(p, smem, w, n);
    n += RowBlocks<C>(p.forward, w).left;
    named_barrier_sync(kAllStored, 256);  // of these keys both gradients are there, and are overwritten by any lane
    for (; again; again &= again - 1) {
      // Both uniform: else the compiler knows of no warp that stays together in the loop over tiles, and spills.
      const int j = uniform(first_key(w) + __ffs(again) - 1);
      if (j < keys_of<C>(p.forward, w.s) && !uniform(key_is_lost<C>(p, w.b, w.h_kv, j))) key_gradient<C>(p, w.b, w.h_kv, j);
    }
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(384, 1)
    bwd_sm90_wide(const __grid_constant__ cupyflash::BackwardParams p, const __grid_constant__ cupyflash::TensorMaps maps) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  cupyflash::backward<Config>(p, maps, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
