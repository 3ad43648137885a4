// bwd_convert.cu: after bwd_sm80 or bwd_sm90, dQ from the sums that its blocks have added up; one warp for 16 rows.
//
// Algorithm  dQ = softmax_scale * sum over the blocks of keys. The sums are read as the warps that added to them held them.
// Way out    A row whose sum is not finite is computed again by row_gradient (see gradient.cuh).
#include "../primitives/gradient.cuh"

namespace cupyflash {

// Scope: warp. Of each four lanes that have a row together, lane t holds words t of four chunks, and then chunk t.
__device__ inline void transpose_quad(unsigned (&r)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = step == 1 ? 2 * pair : pair, high = low + step;
      const unsigned other = __shfl_xor_sync(kWarp, upper ? r[low] : r[high], step);
      r[low] = upper ? other : r[low];
      r[high] = upper ? r[high] : other;
    }
  }
}

// As store_gradient, but 16 bytes a lane and so 64 of a row: its pairs fill only half a sector of 32 at a time.
template <class C>
__device__ inline void store_chunks(typename C::Element* g, long long stride, int count, int width, const float (&r)[C::kHeadDim / 8][4],
                                    float scale) {
  constexpr int kColumns = C::kHeadDim / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 8 * half + lane / 4;
#pragma unroll
    for (int n = 0; n < kColumns; n += 4) {
      unsigned chunk[4] = {};
#pragma unroll
      for (int m = 0; m < 4 && n + m < kColumns; ++m) {
        chunk[m] = pack(r[n + m][2 * half] * scale, r[n + m][2 * half + 1] * scale, typename C::Element{});
      }
      transpose_quad(chunk);
      const int column = 8 * (n + lane % 4);
      if (i < count && column < width) global_store_16(g + i * stride + column, chunk);
    }
  }
}

template <class C>
__device__ inline void convert(const BackwardParams& p, int b, int h, int row) {
  const ForwardParams& f = p.forward;
  using Sums = QuerySums<C>;
  const float* gSum = Sums::at(Sums::of_head(p, b, h), row / 16, 0);
  float rdQ[1][C::kHeadDim / 8][4];
#pragma unroll
  for (int n = 0; n < C::kHeadDim / 8; ++n) Sums::read(gSum + n * 128, rdQ[0][n]);

  auto* g = static_cast<typename C::Element*>(p.dq) + b * p.dq_stride_batch + h * p.dq_stride_head + row * p.dq_stride_seq;
  const float scale = static_cast<float>(f.softmax_scale);
  const int count = f.seqlen_q - row;
  if constexpr (C::kUnaligned) {
    store_gradient<true, C::kHeadDim, 1, 1>(g, p.dq_stride_seq, count, f.head_dim, rdQ, scale, 0);
  } else {
    store_chunks<C>(g, p.dq_stride_seq, count, f.head_dim, rdQ[0], scale);
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
