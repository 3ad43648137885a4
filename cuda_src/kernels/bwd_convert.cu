// bwd_convert.cu: after bwd_sm80, dQ from the sums that its blocks have added up; one warp for 16 rows.
//
// Algorithm  dQ = softmax_scale * sum over the blocks of keys. The sums are read as the warps of bwd_sm80 held them.
// Way out    A row whose sum is not finite is computed again by row_gradient (see gradient.cuh).
#include "../primitives/gradient.cuh"

namespace cupyflash {

template <class C>
__device__ void convert(const BackwardParams& p, long long warp) {
  const ForwardParams& f = p.forward;
  const int row_tiles = (f.seqlen_q + 15) / 16;
  const long long head = warp / row_tiles;
  const int b = static_cast<int>(head / f.num_heads_q), h = static_cast<int>(head % f.num_heads_q);
  const int row = static_cast<int>(warp % row_tiles) * 16;
  if (b >= f.batch) return;
  using Sums = QuerySums<C>;
  const float* g = Sums::at(Sums::of_head(p, b, h), row / 16, 0);
  float rdQ[1][C::kHeadDim / 8][4];
#pragma unroll
  for (int n = 0; n < C::kHeadDim / 8; ++n) Sums::read(g + n * 128, rdQ[0][n]);
  finish_rows<C, 1>(p, b, h, row, rdQ);
}

}  // namespace cupyflash

// At least two blocks an SM: without a number ptxas keeps to 96 registers on some architectures, and spills.
extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 2) bwd_convert(const __grid_constant__ cupyflash::BackwardParams p) {
  cupyflash::convert<Config>(p, static_cast<long long>(blockIdx.x) * Config::kWarps + threadIdx.x / 32);
}
