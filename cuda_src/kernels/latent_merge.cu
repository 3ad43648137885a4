// latent_merge.cu: after latent_sm90.cu, the parts of items that several blocks have become rows of O. Parts are read from the L2 by as
// many blocks as fill the GPU, since each is 128 kB.
#include "../primitives/parts.cuh"

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) latent_merge(const __grid_constant__ cupyflash::ForwardParams p) {
  __shared__ cupyflash::Shared<Config> shared;
  cupyflash::merge_item<Config>(p, shared, p.parts / (2 * p.section));  // without splits a block has room for two
}
