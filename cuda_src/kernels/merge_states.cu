// merge_states.cu: attention over the union of disjoint sets of keys, from the attention over each set; any dtype.
//
// Algorithm  lse = log(sum_n exp(lse_n)), out = sum_n exp(lse_n - lse) out_n (Flash-Decoding, Dao et al. 2023; FlashInfer, arXiv
//            2501.01005, section 2.2). A weight is exp(lse_n - max) / sum: of the rounded lse it would have its error.
// Work       A thread has 16 bytes of one row of the result, so that rows of every width fill the warps, and none waits for another. Each
//            finds the weights of its row by itself: that is an exponential and 4 bytes from the L1 for each 16 bytes from memory.
// Edges      A part without weight is not read: it may hold anything. Where no part has any, the result is 0 and -inf. What +inf and NaN
//            among the LSEs become is as in the definition.
#include "../primitives/work.cuh"

namespace cupyflash {

template <class C>
__device__ inline void merge_chunk(const MergeParams& p, int chunk) {
  using Element = typename C::Element;
  using Acc = typename AccumulatorOf<Element>::Type;
  constexpr int kElements = 16 / sizeof(Element);
  using Chunk = Elements<Element, kElements>;
  const int d = chunk % p.chunks * kElements, row = chunk / p.chunks;
  const int h = row % p.num_heads, i = row / p.num_heads % p.seqlen, b = row / p.num_heads / p.seqlen;
  if (b >= p.batch) return;
  auto lse_of = [&](int n) {
    return static_cast<const Acc*>(p.lses[n])[b * p.lses_stride_batch[n] + h * p.lses_stride_head[n] + i * p.lses_stride_seq[n]];
  };

  Acc row_max = -infinity(Acc());
  for (int n = 0; n < p.parts; ++n) row_max = max_or_nan(row_max, lse_of(n));
  const Acc reference = row_max == -infinity(Acc()) ? Acc(0) : row_max;  // no key in any: exp(-inf - 0) = 0
  Acc row_sum = 0;
  for (int n = 0; n < p.parts; ++n) row_sum += exp_of(lse_of(n) - reference);
  const Acc scale = row_sum == Acc(0) ? Acc(1) : 1 / row_sum;

  Acc rO[kElements] = {};
  for (int n = 0; n < p.parts; ++n) {
    const Acc weight = exp_of(lse_of(n) - reference) * scale;
    if (weight == Acc(0)) continue;  // 0 x NaN would be NaN
    const Element* gO_n =
        static_cast<const Element*>(p.outs[n]) + b * p.outs_stride_batch[n] + i * p.outs_stride_seq[n] + h * p.outs_stride_head[n];
    Chunk rO_n{};
    if constexpr (C::kUnaligned) {
      for (int e = 0; e < kElements && d + e < p.head_dim_v; ++e) rO_n.x[e] = gO_n[(d + e) * p.outs_stride_dim[n]];
    } else {
      rO_n = *reinterpret_cast<const Chunk*>(gO_n + d);
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) rO[e] += weight * widen(rO_n.x[e]);
  }

  Element* gO = static_cast<Element*>(p.out) + b * p.out_stride_batch + i * p.out_stride_seq + h * p.out_stride_head;
  Chunk result;
#pragma unroll
  for (int e = 0; e < kElements; ++e) narrow(rO[e], result.x[e]);
  if constexpr (C::kUnaligned) {
    for (int e = 0; e < kElements && d + e < p.head_dim_v; ++e) gO[(d + e) * p.out_stride_dim] = result.x[e];
  } else {
    *reinterpret_cast<Chunk*>(gO + d) = result;
  }
  if (d == 0) {
    static_cast<Acc*>(p.lse)[b * p.lse_stride_batch + h * p.lse_stride_head + i * p.lse_stride_seq] = row_max + log_of(row_sum);
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) merge_states(const __grid_constant__ cupyflash::MergeParams p) {
  cupyflash::merge_chunk<Config>(p, blockIdx.x * (32 * Config::kWarps) + threadIdx.x);  // plan.py makes sure that it is below 2^31
}
