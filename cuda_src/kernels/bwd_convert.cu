// bwd_convert.cu: after bwd_sm80, bwd_sm90 or bwd_sm90_wide, dQ from the sums that its blocks have added up; one warp for 16 rows.
//
// Algorithm  dQ = softmax_scale * sum over the blocks of keys. The sums are read as the warps that added to them held them.
// Way out    A row whose sum is not finite is computed again by row_gradient (see gradient.cuh).
#include "../primitives/gradient.cuh"

namespace cupyflash {

// The sequence whose sums begin at `row` of a head or before.
template <class C>
__device__ inline int sequence_of_sums(const ForwardParams& f, int row) {
  int low = -1, high = f.batch;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (sum_rows_before<C>(sequence_of<C>(f, middle), middle) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <class C>
__device__ inline void convert(const BackwardParams& p, int b, int h, int row) {
  const ForwardParams& f = p.forward;
  using Sums = QuerySums<C>;
  if constexpr (C::kPacked) b = sequence_of_sums<C>(f, row);
  const SequenceOf<C> s = sequence_of<C>(f, b);
  if constexpr (C::kPacked) {
    row -= sum_rows_before<C>(s, b);
    if (row >= s.len_q) return;
  }
  float* const gHead = Sums::of_head(p, s, b, h);
  float rdQ[1][C::kHeadDim / 8][4];
#pragma unroll
  for (int n = 0; n < C::kHeadDim / 8; ++n) Sums::read(Sums::at(gHead, row / 16, n), rdQ[0][n]);

  auto* g =
      static_cast<typename C::Element*>(p.dq) + b * p.dq_stride_batch + h * p.dq_stride_head + (rows_before<C>(s) + row) * p.dq_stride_seq;
  const float scale = static_cast<float>(f.softmax_scale);
  const int count = rows_of<C>(f, s) - row;
  if constexpr (C::kUnaligned) {
    store_gradient<true, C::kHeadDim, 1, 1>(g, p.dq_stride_seq, count, f.head_dim, rdQ, scale, 0);
  } else {
    store_chunks<C::kHeadDim>(g, p.dq_stride_seq, count, f.head_dim, rdQ[0], scale);
  }
  repair_rows<C, 1>(p, s, b, h, row, rdQ);
}

}  // namespace cupyflash

// At least two blocks an SM: without a number ptxas keeps to 96 registers on some architectures, and spills.
extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 2) bwd_convert(const __grid_constant__ cupyflash::BackwardParams p) {
  const int length = Config::kPacked ? static_cast<int>(p.dq_sum_rows) : p.forward.seqlen_q;
  const cupyflash::HeadRows block(p.forward, 16 * Config::kWarps, length);
  const int row = block.row + threadIdx.x / 32 * 16;
  if (row < length) cupyflash::convert<Config>(p, block.b, block.h, row);
}
