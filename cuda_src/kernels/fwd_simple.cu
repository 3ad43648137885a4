// fwd_simple.cu: attention forward, one warp for one query row; any architecture, any dtype, every option. Read it first.
//
// Algorithm  online softmax (Milakov and Gimelshein, arXiv 1805.02867) over 32 keys at a time; the loop is attend_row in row.cuh.
// Work       a block is C::kWarps consecutive rows; the grid is one-dimensional, since batch x heads may pass 65535.
// Not here   tiles: every row reads all of its K and V again, so this is the fallback, not the fast path.
#include "../primitives/row.cuh"

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) fwd_simple(const __grid_constant__ cupyflash::ForwardParams p) {
  const long long row = static_cast<long long>(blockIdx.x) * Config::kWarps + threadIdx.x / 32;
  const long long head = row / p.seqlen_q;
  const int b = static_cast<int>(head / p.num_heads_q);
  if (b >= p.batch) return;
  cupyflash::attend_row<Config>(p, b, static_cast<int>(head % p.num_heads_q), static_cast<int>(row % p.seqlen_q));
}
