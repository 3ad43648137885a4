// bwd_sum.cu: after the backward, the gradients that are sums over rows: of ALiBi slopes and of sinks. One warp for one of them.
//
// Algorithm  dSlope = -sum over rows of row_slope, dSink = -sum over rows of row_sink, of a head, and of all batches where one slope
//            serves all. In float64 and in one fixed order: lane l takes rows l, l + 32, ..., the lanes are added in pairs.
// Work       The grid's warps are, in this order, the elements of dSlopes and those of dSink.
#include "../primitives/row.cuh"

namespace cupyflash {

template <class C>
__device__ inline double sum_of_rows(const ForwardParams& f, const void* rows, int first_batch, int last_batch, int h) {
  using Acc = typename AccumulatorOf<typename C::Element>::Type;
  double sum = 0;
  auto add = [&](long long first, int count) {
    const Acc* g = static_cast<const Acc*>(rows) + first;
    for (int i = threadIdx.x % 32; i < count; i += 32) sum += g[i];
  };
  if (C::kPacked && first_batch == 0 && last_batch == f.batch) {  // of all rows: what lies between sequences is 0
    if (f.batch > 0) add(static_cast<long long>(h) * f.seqlen_q, f.seqlen_q);
  } else {
    for (int b = first_batch; b < last_batch; ++b) {
      const SequenceOf<C> s = sequence_of<C>(f, b);
      add(first_in_vector<C>(f, s, b, h), rows_of<C>(f, s));
    }
  }
  return warp_sum(sum);
}

template <class C>
__device__ void sum_rows(const BackwardParams& p, long long warp) {
  const ForwardParams& f = p.forward;
  const bool writes = threadIdx.x % 32 == 0;
  if constexpr (C::kAlibi) {
    const long long count = p.dalibi_slopes ? p.dalibi_batch * f.num_heads_q : 0;
    if (warp < count) {
      const int b = static_cast<int>(warp / f.num_heads_q);
      const int last = p.dalibi_batch == 1 ? f.batch : b + 1;
      const double sum = sum_of_rows<C>(f, p.row_slope, b, last, static_cast<int>(warp % f.num_heads_q));
      if (writes) p.dalibi_slopes[warp] = static_cast<float>(-sum);
      return;
    }
    warp -= count;
  }
  if constexpr (C::kSink) {
    if (p.dsink && warp < f.num_heads_q) {
      const double sum = sum_of_rows<C>(f, p.row_sink, 0, f.batch, static_cast<int>(warp));
      if (writes) narrow(-sum, static_cast<typename C::Sink*>(p.dsink)[warp]);
    }
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) bwd_sum(const __grid_constant__ cupyflash::BackwardParams p) {
  cupyflash::sum_rows<Config>(p, static_cast<long long>(blockIdx.x) * Config::kWarps + threadIdx.x / 32);
}
