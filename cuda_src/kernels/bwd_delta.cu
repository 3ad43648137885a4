// bwd_delta.cu: before the backward, what each query row must know of its other keys; one warp a row, any dtype.
//
// Algorithm  delta_i = dO_i . O_i - dLSE_i (FlashAttention-2, arXiv 2307.08691, algorithm 2, line 4; dLSE: a gradient through the LSE adds
//            P dLSE to dS, so it joins delta). The LSE is copied, of any strides, into a compact workspace.
// Edges      A row that sees no key, or past its used length, has LSE = +inf and delta = 0 from here on: P = exp(S - LSE) = 0. Nothing of
//            its dO, O and dLSE is used, so a NaN there goes nowhere.
// Sink       Its gradient is -sum over rows of P_sink * delta: each row's part is left in row_sink for bwd_sum.
#include "../primitives/row.cuh"

namespace cupyflash {

template <class C>
__device__ void row_delta(const BackwardParams& p, int b, int h, int i) {
  using Out = typename C::Out;
  using Acc = typename AccumulatorOf<typename C::Element>::Type;
  const ForwardParams& f = p.forward;
  const int lane = threadIdx.x % 32;
  const Out* gO = static_cast<const Out*>(f.out) + b * f.out_stride_batch + i * f.out_stride_seq + h * f.out_stride_head;
  const Out* gdO = static_cast<const Out*>(p.dout) + b * p.dout_stride_batch + i * p.dout_stride_seq + h * p.dout_stride_head;

  const bool used = i < sequence_of<C>(f, b).used_q;
  Acc lse = static_cast<const Acc*>(f.lse)[b * p.lse_stride_batch + h * p.lse_stride_head + i * p.lse_stride_seq];
  const bool empty = !used || lse == -infinity(Acc());
  if (empty) lse = infinity(Acc());
  Acc delta = 0;
  if (!empty) {
    for (int d = lane; d < f.head_dim_v; d += 32) {
      delta += static_cast<Acc>(widen(gdO[d * p.dout_stride_dim])) * static_cast<Acc>(widen(gO[d]));
    }
    delta = warp_sum(delta);
    if (p.dlse) delta -= static_cast<const Acc*>(p.dlse)[b * p.dlse_stride_batch + h * p.dlse_stride_head + i * p.dlse_stride_seq];
  }

  if (lane != 0) return;
  const long long row = (static_cast<long long>(b) * f.num_heads_q + h) * f.seqlen_q + i;
  static_cast<Acc*>(p.row_lse)[row] = lse;
  static_cast<Acc*>(p.row_delta)[row] = delta;
  if constexpr (C::kSink) {
    if (p.dsink) {
      const Acc sink = static_cast<Acc>(widen(static_cast<const typename C::Sink*>(f.sink)[h * f.sink_stride]));
      static_cast<Acc*>(p.row_sink)[row] = empty ? Acc(0) : exp_of(sink - lse) * delta;
    }
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) bwd_delta(const __grid_constant__ cupyflash::BackwardParams p) {
  const long long row = static_cast<long long>(blockIdx.x) * Config::kWarps + threadIdx.x / 32;
  const long long head = row / p.forward.seqlen_q;
  const int b = static_cast<int>(head / p.forward.num_heads_q);
  if (b >= p.forward.batch) return;
  cupyflash::row_delta<Config>(p, b, static_cast<int>(head % p.forward.num_heads_q), static_cast<int>(row % p.forward.seqlen_q));
}
