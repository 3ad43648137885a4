// bwd_convert.cu: after bwd_sm80 or bwd_sm90, dQ from the sums that its blocks have added up; one warp for 16 rows.
//
// Algorithm  dQ = softmax_scale * sum over the blocks of keys. The sums are read as the warps that added to them held them.
// Way out    A row whose sum is not finite is computed again by row_gradient (see gradient.cuh).
#include "../primitives/gradient.cuh"

namespace cupyflash {

// Scope: warp. 16 rows of sums that lie as tiles of dQ^T: lane l has columns l / 4 and l / 4 + 8 of two rows, and gets two columns of a
// row.
template <class C>
__device__ inline void read_transposed(float* gHead, int row, float (&r)[C::kHeadDim / 8][4]) {
  using Sums = QuerySums<C>;
  float rT[2][C::kHeadDim / 16][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 16; ++n) Sums::read(Sums::at_transposed(gHead, row / 8 + half, n), rT[half][n]);
  }
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // column 2 (l % 4) + e % 2 of tile 2 n + e / 2, of row l / 4
        const int source = 4 * (2 * (lane % 4) + e % 2) + lane / 8;
        const float even = __shfl_sync(kWarp, rT[half][n][e / 2 * 2], source), odd = __shfl_sync(kWarp, rT[half][n][e / 2 * 2 + 1], source);
        r[2 * n + e / 2][2 * half + e % 2] = lane / 4 % 2 ? odd : even;
      }
    }
  }
}

template <class C>
__device__ inline void convert(const BackwardParams& p, int b, int h, int row) {
  const ForwardParams& f = p.forward;
  using Sums = QuerySums<C>;
  float* const gHead = Sums::of_head(p, b, h);
  float rdQ[1][C::kHeadDim / 8][4];
  if constexpr (Sums::kTransposed) {
    read_transposed<C>(gHead, row, rdQ[0]);
  } else {
    const float* gSum = Sums::at(gHead, row / 16, 0);
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n) Sums::read(gSum + n * 128, rdQ[0][n]);
  }

  auto* g = static_cast<typename C::Element*>(p.dq) + b * p.dq_stride_batch + h * p.dq_stride_head + row * p.dq_stride_seq;
  const float scale = static_cast<float>(f.softmax_scale);
  const int count = f.seqlen_q - row;
  if constexpr (C::kUnaligned) {
    store_gradient<true, C::kHeadDim, 1, 1>(g, p.dq_stride_seq, count, f.head_dim, rdQ, scale, 0);
  } else {
    store_chunks<C::kHeadDim>(g, p.dq_stride_seq, count, f.head_dim, rdQ[0], scale);
  }
  repair_rows<C, 1>(p, b, h, row, rdQ);
}

}  // namespace cupyflash

// At least two blocks an SM: without a number ptxas keeps to 96 registers on some architectures, and spills.
extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 2) bwd_convert(const __grid_constant__ cupyflash::BackwardParams p) {
  const cupyflash::HeadRows block(p.forward, 16 * Config::kWarps);
  const int row = block.row + threadIdx.x / 32 * 16;
  if (row < p.forward.seqlen_q) cupyflash::convert<Config>(p, block.b, block.h, row);
}
