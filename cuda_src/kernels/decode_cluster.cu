// decode_cluster.cu: decode for one sequence, whose heads are too few to fill the GPU: for sm_90 and newer. Read it after decode.cu.
//
// Work       Each cluster has a key head, or a block of its rows, and its blocks have equal shares of the keys.
// Merge      What the blocks have stays in their shared memory, where the others read it: no counters, no workspaces, and at 1024 keys,
//            where nothing takes long, 6.6 us instead of 8.1.
#include "../primitives/decode.cuh"

namespace cupyflash {

// Scope: thread. What the blocks of a cluster have.
template <class C>
__device__ inline Merged<C> merge_blocks(Smem<C>& smem, int n) {
  Merged<C> merged(n);
  float reference[C::kCluster], sum[C::kCluster], x[C::kCluster][4];
#pragma unroll
  for (int block = 0; block < C::kCluster; ++block) {
    reference[block] = cluster_load(smem_address(&smem.block_reference[merged.row]), block);
    sum[block] = cluster_load(smem_address(&smem.block_sum[merged.row]), block);
    cluster_load_4(x[block], smem_address(&smem.out[0][merged.row][merged.column]), block);
  }
#pragma unroll
  for (int block = 0; block < C::kCluster; ++block) merged.reference = fmaxf(merged.reference, reference[block]);
#pragma unroll
  for (int block = 0; block < C::kCluster; ++block) merged.add(reference[block], sum[block], x[block]);
  return merged;
}

// Scope: block.
template <class C>
__device__ inline void decode_cluster(const ForwardParams& p, Smem<C>& smem) {
  constexpr int kThreads = 32 * C::kWarps;
  const int rank = blockIdx.x % C::kCluster, item = blockIdx.x / C::kCluster;
  const Extent<C> e(p, 0);
  const int h_kv = e.row_blocks == 1 ? item : item / e.row_blocks, row = (item - h_kv * e.row_blocks) * C::kBlockM;
  const int each = (e.units + C::kCluster - 1) / C::kCluster, last = e.first_unit + e.units;
  const Segment<C> g{0, h_kv, row, min(e.first_unit + rank * each, last), min(e.first_unit + (rank + 1) * each, last)};
  if (threadIdx.x == 0) smem.shared.lost.clear();
  load_queries<C>(p, e, g, smem);
  compute<C>(p, e, g, smem);
  const int items = min(e.rows - g.row, C::kBlockM) * Merged<C>::kOfRow;
#pragma unroll 1
  for (int m = threadIdx.x; m < items; m += kThreads) {
    const Merged<C> merged = merge_warps<C>(smem, m);
    for (int c = 0; c < 4; ++c) smem.out[0][merged.row][merged.column + c] = merged.out[c];  // which no other thread reads
    if (merged.column == 0) {
      smem.block_reference[merged.row] = merged.reference;
      smem.block_sum[merged.row] = merged.sum;
    }
  }
  cluster_sync();
#pragma unroll 1
  for (int m = rank * kThreads + threadIdx.x; m < items; m += kThreads * C::kCluster) {
    write<C>(p, e, g, merge_blocks<C>(smem, m), smem.shared.lost);
  }
  cluster_sync();  // all have read
  if (smem.shared.lost.any()) write_lost<C>(p, g, smem.shared.lost);
}

}  // namespace cupyflash

extern "C" __global__ void __cluster_dims__(Config::kCluster, 1, 1) __launch_bounds__(32 * Config::kWarps, Config::kBlocks)
    decode_cluster(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::decode_cluster<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
