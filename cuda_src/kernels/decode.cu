// decode.cu: attention of few query rows over many keys, in pages or not, by cp.async and mma.sync, for fp16 and bf16 on sm_80 and newer.
// Read it after fwd_sm80.cu.
//
// Algorithm  Flash-Decoding (Dao et al. 2023): blocks compute parts of the keys, each a softmax of its own, which are merged by their LSE.
//            The query heads that read one key head are rows of one tile, so K and V pass by once.
// Work       The units of all sequences, C::kWarps * kBlockN keys each, stand in one row, and each team of blocks takes an equal share of
//            it: what it has of one (sequence, group of key heads, block of rows) is a segment. Each block of a team has a head of its own,
//            so that what lies side by side in memory is read at the same time. At most the first and the last segment of a team are parts
//            of something larger. With `split` a unit is such a split instead, and each split a part: what a sequence gets then does not
//            depend on the others.
// Threads    A warp has all rows, and of each unit kBlockN keys of its own: it copies them itself, kStages ahead, and waits for nobody.
//            What the warps have is merged through shared memory at the end of a segment.
// Merge      The block that finishes the last part of something merges all of them, in the order of their keys: it is the same result bit
//            by bit whoever is last. The counters are zero before the kernel, and it leaves them so.
// Edges      A key that no row sees is not read. A sequence without keys has one unit, of which nothing is visible.
// Way out    As fwd_sm80: a row that left the range is computed again by attend_row.
#include "../primitives/parts.cuh"

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, Config::kBlocks)
    decode(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  auto& smem = *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem);
  cupyflash::decode<Config>(p, smem, [&](const auto& e, const auto& g) { cupyflash::compute<Config>(p, e, g, smem); });
}
