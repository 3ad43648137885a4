// decode_begin.cu: before decode, none of its parts has arrived.
#include "../primitives/params.cuh"

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) decode_begin(const __grid_constant__ cupyflash::ForwardParams p) {
  const int n = blockIdx.x * 32 * Config::kWarps + threadIdx.x;
  if (n < p.parts) p.arrived[n] = 0;
}
