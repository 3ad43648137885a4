// bwd_simple.cu: gradients of attention, one warp for one row of dQ, or of dK and dV, or for one element of dBias; any architecture, any
// dtype, every option. Read it after fwd_simple.cu; bwd_delta.cu has run before it.
//
// Algorithm  FlashAttention-2's backward (arXiv 2307.08691, algorithm 2) without its tiles. For a pair of row i and key j that it sees:
//            P = exp(S - LSE_i), dS = P (dO_i . V_j - delta_i); dV_j += P dO_i, dQ_i += scale dS' K_j, dK_j += scale dS' Q_i, where dS' is
//            dS times the slope of the softcap, and dBias_ij += dS.
// Work       The grid's warps are, in this order, the B Hq Sq rows of dQ, the B Hkv Sk rows of dK and dV, the elements of dBias. Each sums
//            what is its own in one fixed order: no atomics, equal bits in every run.
// Edges      A pair that is not visible is skipped before its key or row is multiplied: a NaN there goes nowhere. A row without keys has
//            LSE = +inf and is skipped as well.
// Not here   tiles: each pair is computed once for dQ and once for dK and dV, from memory, so this is the fallback, not the fast path.
#include "../primitives/row_gradient.cuh"

namespace cupyflash {

// One element of dBias: the sum of dS over the axes along which the bias was broadcast, whose size is 1 in dBias.
template <class C>
__device__ void bias_gradient(const BackwardParams& p, long long element) {
  using H = Head<C>;
  using Acc = typename H::Acc;
  const ForwardParams& f = p.forward;
  const long long full[4] = {f.batch, f.num_heads_q, f.seqlen_q, f.seqlen_k};
  const long long size[4] = {p.dbias_batch, p.dbias_heads, p.dbias_q, p.dbias_k};
  int first[4], last[4];
  long long rest = element;
#pragma unroll  // constant indices keep the arrays in registers
  for (int axis = 3; axis >= 0; --axis) {
    const bool is_summed = size[axis] == 1;
    first[axis] = is_summed ? 0 : static_cast<int>(rest % size[axis]);
    last[axis] = is_summed ? static_cast<int>(full[axis]) : first[axis] + 1;
    rest /= size[axis];
  }
  Acc rQ[H::kPerLane], rK[H::kPerLane], rdO[H::kPerLaneV], rV[H::kPerLaneV];
  Acc sum = 0;
  for (int b = first[0]; b < last[0]; ++b) {
    for (int h = first[1]; h < last[1]; ++h) {
      const H head(p, b, h);
      for (int i = first[2]; i < min(last[2], head.s.used_q); ++i) {
        for (int j = first[3]; j < min(last[3], head.s.used_k); ++j) {
          if (!head.sees(i, j)) continue;
          head.load_q(i, rQ);
          head.load_k(j, rK);
          head.load_dout(i, rdO);
          head.load_v(j, rV);
          sum += pair_of<C>(head, i, j, rQ, rK, rdO, rV).d_score;
        }
      }
    }
  }
  if (threadIdx.x % 32 == 0) narrow(sum, static_cast<typename C::Bias*>(p.dbias)[element]);
}

template <class C>
__device__ void gradient(const BackwardParams& p, long long warp) {
  const ForwardParams& f = p.forward;
  const int batches = C::kPacked ? 1 : f.batch;  // of the arrays
  const long long rows = static_cast<long long>(batches) * f.num_heads_q * f.seqlen_q;
  const long long keys = static_cast<long long>(batches) * f.num_heads_kv * f.seqlen_k;
  if (warp < rows) {
    const long long head = warp / f.seqlen_q;
    int b = static_cast<int>(head / f.num_heads_q), i = static_cast<int>(warp % f.seqlen_q);
    if constexpr (C::kPacked) {
      b = sequence_at(f.cu_seqlens_q, f.cu_seqlens_q_stride, f.batch, i);
      i -= sequence_of<C>(f, b).first_q;
    }
    const bool wanted = p.dq || p.dalibi_slopes;
    if (wanted) row_gradient<C>(p, b, head % f.num_heads_q, i);
    return;
  }
  warp -= rows;
  if (warp < keys) {
    const long long head = warp / f.seqlen_k;
    int b = static_cast<int>(head / f.num_heads_kv), j = static_cast<int>(warp % f.seqlen_k);
    if constexpr (C::kPacked) {
      b = sequence_at(f.cu_seqlens_k, f.cu_seqlens_k_stride, f.batch, j);
      j -= sequence_of<C>(f, b).first_k;
    }
    const bool wanted = p.dk || p.dv;
    if (wanted) key_gradient<C>(p, b, head % f.num_heads_kv, j);
    return;
  }
  warp -= keys;
  if constexpr (C::kBias) {
    if (p.dbias && warp < p.dbias_batch * p.dbias_heads * p.dbias_q * p.dbias_k) bias_gradient<C>(p, warp);
  }
}

}  // namespace cupyflash

// At least two blocks an SM: without a number ptxas keeps to 80 registers on some architectures, and spills.
extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 2) bwd_simple(const __grid_constant__ cupyflash::BackwardParams p) {
  cupyflash::gradient<Config>(p, static_cast<long long>(blockIdx.x) * Config::kWarps + threadIdx.x / 32);
}
