// packed_tiles.cu: before the kernels of a packed call, the tiles of its sequences in the order of their length, since no host reads where
// sequences begin. A block lists the blocks of rows, another one those of keys, for the kernels whose tiles these are.
//
// Algorithm  A counting sort. A tile's length is how many keys its rows see, or rows its keys, in steps of 3 %: five bits behind the first
//            one. Which of two tiles of a step comes first is left to chance; results do not depend on it.
// Work       A thread takes a sequence; the tiles of one that has more than a few are dealt out to a warp, so that a long sequence among
//            many short ones takes no longer.
// Edges      Tokens before the first sequence and behind the last one are tiles as well: their results are zeros.
#include "../primitives/work.cuh"

namespace cupyflash {

constexpr int kThreads = 1024, kSteps = 1024;
constexpr int kFew = 8;  // tiles that a thread does by itself

struct Smem {
  int tiles[kSteps];  // of a length; then where the next one of them goes
  int sums[kThreads / 32];
  int many[kThreads];  // sequences of more than a few tiles
  int num_many;
};

// Longer tiles have smaller numbers.
__device__ inline int step_of(int length) { return kSteps - 1 - ((__float_as_int(static_cast<float>(length + 1)) >> 18) - (127 << 5)); }

template <class C, bool kKeys>
__device__ inline int step_of_tile(const ForwardParams& p, const PackedSequence& s, int block, int size) {
  const int first = block * size, end = first + size;
  if constexpr (kKeys) {
    const RowRange rows = visible_rows<C>(p, s, first, min(end, s.used_k));
    return step_of(first < s.used_k ? max(rows.last - rows.first, 0) : 0);
  } else {
    const KeyRange keys = visible_keys<C>(p, s, first, min(end, s.used_q));
    return step_of(first < s.used_q ? max(keys.last - keys.first, 0) : 0);
  }
}

// Scope: block. Calls seen(number of the sequence, sequence, block, step) once for each tile.
template <class C, bool kKeys, class Seen>
__device__ inline void for_each_tile(const ForwardParams& p, Smem& smem, int size, Seen seen) {
  for (int first = -1; first <= p.batch; first += kThreads) {
    if (threadIdx.x == 0) smem.num_many = 0;
    __syncthreads();
    const int b = first + threadIdx.x;
    if (b <= p.batch) {
      const PackedSequence s = sequence_of<C>(p, b);
      const int count = ((kKeys ? s.len_k : s.len_q) + size - 1) / size;
      if (count > kFew) {
        smem.many[atomicAdd(&smem.num_many, 1)] = b;
      } else {
        for (int block = 0; block < count; ++block) seen(b, s, block, step_of_tile<C, kKeys>(p, s, block, size));
      }
    }
    __syncthreads();
    for (int n = threadIdx.x / 32; n < smem.num_many; n += kThreads / 32) {
      const PackedSequence s = sequence_of<C>(p, smem.many[n]);
      const int count = ((kKeys ? s.len_k : s.len_q) + size - 1) / size;
      for (int block = threadIdx.x % 32; block < count; block += 32) {
        seen(smem.many[n], s, block, step_of_tile<C, kKeys>(p, s, block, size));
      }
    }
    __syncthreads();
  }
}

// Scope: block. Numbers become the sum of all before them; returns the sum of all.
__device__ inline int sum_before(Smem& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int own = smem.tiles[threadIdx.x];
  int sum = own;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kWarp, sum, step);
    sum += lane >= step ? other : 0;
  }
  if (lane == 31) smem.sums[warp] = sum;
  __syncthreads();
  int total = 0, before = 0;
  for (int n = 0; n < kThreads / 32; ++n) {
    before += n < warp ? smem.sums[n] : 0;
    total += smem.sums[n];
  }
  smem.tiles[threadIdx.x] = before + sum - own;
  __syncthreads();
  return total;
}

template <class C, bool kKeys>
__device__ inline void list_tiles(const ForwardParams& p, Smem& smem) {
  static_assert(kThreads == kSteps && 32 * C::kWarps == kThreads, "a thread a step");
  auto* const list = static_cast<TileList*>(kKeys ? p.key_tiles : p.row_tiles);
  const int size = kKeys ? p.tile_keys : p.tile_rows;
  smem.tiles[threadIdx.x] = 0;
  __syncthreads();
  for_each_tile<C, kKeys>(p, smem, size, [&](int, const PackedSequence&, int, int step) { atomicAdd(&smem.tiles[step], 1); });
  const int count = sum_before(smem);
  for_each_tile<C, kKeys>(p, smem, size, [&](int b, const PackedSequence& s, int block, int step) {
    list->tiles[atomicAdd(&smem.tiles[step], 1)] = ListedTile{b, block, s.used_q, s.used_k, s.first_q, s.first_k, s.len_q, s.len_k};
  });
  if (threadIdx.x == 0) {
    list->count = count;
    list->taken = 0;
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps) packed_tiles(const __grid_constant__ cupyflash::ForwardParams p) {
  __shared__ cupyflash::Smem smem;
  if (blockIdx.x == 0 && p.row_tiles) cupyflash::list_tiles<Config, false>(p, smem);
  if (blockIdx.x == 1 && p.key_tiles) cupyflash::list_tiles<Config, true>(p, smem);
}
