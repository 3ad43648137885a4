// tma.cuh: tiles by the tensor memory accelerator, and the barriers that say where one is.
#pragma once

#include "ptx.cuh"

namespace cupyflash {

struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// A ring of kStages buffers: how many of them have been used, which says where the next one is and the parity of its phase.
template <int kStages>
struct Ring {
  unsigned used = 0;
  __device__ unsigned stage() const { return used % kStages; }
  __device__ unsigned parity() const { return used / kStages % 2; }
};

// Scope: one thread. Queues the copy of a tile (Panels), panel by panel; its bytes have been announced to the barrier.
template <class T>
__device__ inline void load_panels(const char* tile, const TensorMap& map, unsigned long long& barrier, int row, int head, int batch) {
#pragma unroll
  for (int n = 0; n < T::kCount; ++n) {
    tma_load(smem_address(tile + n * T::kPanelBytes), &map, smem_address(&barrier), 64 * n, row, head, batch);
  }
}

// Scope: one thread. The same, announced.
template <class T>
__device__ inline void load_tile_of(const char* tile, const TensorMap& map, unsigned long long& barrier, int row, int head, int batch) {
  mbarrier_arrive_expect(smem_address(&barrier), T::kBytes);
  load_panels<T>(tile, map, barrier, row, head, batch);
}

// Scope: warp. A buffer is free again.
__device__ inline void release(unsigned long long& barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&barrier));
}

}  // namespace cupyflash
