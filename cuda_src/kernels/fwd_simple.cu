// fwd_simple.cu: attention forward, one warp for one query row; any architecture, any dtype, every option. Read it first.
//
// Algorithm  online softmax (Milakov and Gimelshein, arXiv 1805.02867) over 32 keys at a time; the loop is attend_row in row.cuh.
// Work       a block is C::kWarps consecutive rows; the grid is one-dimensional, since batch x heads may pass 65535.
// Not here   tiles: every row reads all of its K and V again, so this is the fallback, not the fast path.
#include "../primitives/row.cuh"

namespace cupyflash {

template <class C>
__device__ inline void forward(const ForwardParams& p, long long row) {
  const long long head = row / p.seqlen_q;
  int b = static_cast<int>(head / p.num_heads_q), i = static_cast<int>(row % p.seqlen_q);
  if (b >= (C::kPacked ? 1 : p.batch)) return;
  if constexpr (C::kPacked) {
    b = sequence_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, p.batch, i);
    i -= sequence_of<C>(p, b).first_q;
  }
  attend_row<C>(p, b, static_cast<int>(head % p.num_heads_q), i);
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) fwd_simple(const __grid_constant__ cupyflash::ForwardParams p) {
  cupyflash::forward<Config>(p, static_cast<long long>(blockIdx.x) * Config::kWarps + threadIdx.x / 32);
}
