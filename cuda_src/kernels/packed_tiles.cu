// packed_tiles.cu: before the kernels of a packed call, the order of the tiles of its sequences, since no host reads where they begin. A
// block lists the blocks of rows of a head, others those of keys, for the kernels whose tiles these are.
//
// Algorithm  Sequences come by their length, the longest first, and are cut into sections: p.section tokens that all heads read (or, where
//            rows pass by blocks of keys, add to) share the L2. The tiles of a section come longest first, those of as many heads at a time
//            as keep to p.section tokens of all. All tiles longest first, whatever their sequence, gives equal loads as well, but then
//            eight sequences of 4096 tokens took 1.6 times as long in the backward, and 1.1 times in the forward (H200, D = 128).
// Sorting    By counting: tokens of sequences of a length, in steps of 3 %; then tiles of a section and of a class of lengths. Sequences of
//            a step are spread over its sections by their numbers, so that the blocks of all heads agree on sections without a word. Which
//            tile comes first in a class is left to chance; results do not depend on it.
// Work       As many threads take a sequence as there are for each, up to a warp, and its tiles in turn: one thread alone would do them one
//            after the other, each some 200 instructions that wait for one another. The tiles of one that has more than a few for each
//            are dealt out to a warp later, so that a long sequence among many short ones takes no longer.
// Edges      Tokens before the first sequence and behind the last one are tiles as well: their results are zeros. Offsets that fall
//            may make more tiles than there is room for, and then none is listed.
#include "../primitives/work.cuh"

namespace cupyflash {

constexpr int kThreads = 1024, kSteps = 1024;
constexpr int kSections = 64, kClasses = 16;  // plan.py keeps to so many sections
constexpr int kFew = 8;                       // tiles that a thread does by itself

struct Smem {
  int tiles[kThreads];     // of a section and class; then where the next one of them goes
  int tokens[kSteps + 1];  // of sequences of a length; then of all longer ones
  int section_tokens[kSections], section_first[kSections + 1];
  int sums[kThreads / 32];
  int many[kThreads];  // sequences of more than a few tiles
  int num_many;
};

// What the tiles of a list are tiles of, and what they pass by.
template <bool kKeys>
struct Side {
  static __device__ int length(const PackedSequence& s) { return kKeys ? s.len_k : s.len_q; }
  static __device__ int passing(const PackedSequence& s) { return kKeys ? s.used_q : s.used_k; }
};

// Longer sequences have smaller numbers.
__device__ inline int step_of(int length) { return kSteps - 1 - ((__float_as_int(static_cast<float>(length + 1)) >> 18) - (127 << 5)); }

// Where a block of a sequence begins: kFromLast has rows counted from the last one up, so that its first block may begin before row 0.
template <class C, bool kKeys>
__device__ inline int first_of(const PackedSequence& s, int block, int size) {
  const int length = Side<kKeys>::length(s);
  return block * size - (C::kFromLast && !kKeys ? (length + size - 1) / size * size - length : 0);
}

// Longer tiles of a sequence have smaller numbers: by how much of what passes by meets the tile.
template <class C, bool kKeys>
__device__ inline int class_of(const ForwardParams& p, const PackedSequence& s, int block, int size) {
  const int first = first_of<C, kKeys>(s, block, size), end = first + size;
  int met = 0;
  if (kKeys && first < s.used_k) {
    const RowRange rows = visible_rows<C>(p, s, first, min(end, s.used_k));
    met = max(rows.last - rows.first, 0);
  } else if (!kKeys && first < s.used_q) {
    const KeyRange keys = visible_keys<C>(p, s, max(first, 0), min(end, s.used_q));
    met = max(keys.last - keys.first, 0);
  }
  return static_cast<int>((kClasses - 1) * (1 - static_cast<float>(met) / max(Side<kKeys>::passing(s), 1)));
}

// Sequences of a step are taken for evenly spread over all.
template <bool kKeys>
__device__ inline int section_of(const ForwardParams& p, const Smem& smem, const PackedSequence& s, int b) {
  const int own = Side<kKeys>::passing(s), step = step_of(own), before = smem.tokens[step];
  const float others = static_cast<float>(smem.tokens[step + 1] - before - own);
  const float first = static_cast<float>(before) + others * (static_cast<float>(b + 1) / static_cast<float>(p.batch + 2));
  return clamp(static_cast<int>(first / static_cast<float>(p.section)), 0, kSections - 1);
}

// Scope: block. Calls seen(sequence, its number, its section, block) once for each tile.
template <class C, bool kKeys, class Seen>
__device__ inline void for_each_tile(const ForwardParams& p, Smem& smem, int size, Seen seen) {
  if (threadIdx.x == 0) smem.num_many = 0;
  __syncthreads();
  const int sequences = p.batch + 2;
  int each = 1;  // threads
  while (each < 32 && 2 * each * sequences <= kThreads) each *= 2;
  for (int n = threadIdx.x; n < each * sequences; n += kThreads) {
    const int b = n / each - 1, own = n % each;
    const PackedSequence s = sequence_of<C>(p, b);
    const int count = (Side<kKeys>::length(s) + size - 1) / size;
    if (count > kFew * each) {
      bool later = each > 1;  // then there is room for all of them
      if (own == 0) {
        const int place = atomicAdd(&smem.num_many, 1);
        later = place < kThreads;
        if (later) smem.many[place] = b;
      }
      if (later) continue;
    }
    const int section = section_of<kKeys>(p, smem, s, b);
    for (int block = own; block < count; block += each) seen(s, b, section, block);
  }
  __syncthreads();
  for (int n = threadIdx.x / 32; n < min(smem.num_many, kThreads); n += kThreads / 32) {
    const PackedSequence s = sequence_of<C>(p, smem.many[n]);
    const int count = (Side<kKeys>::length(s) + size - 1) / size;
    const int section = section_of<kKeys>(p, smem, s, smem.many[n]);
    for (int block = threadIdx.x % 32; block < count; block += 32) seen(s, smem.many[n], section, block);
  }
  __syncthreads();
}

// Scope: block. The number of each thread becomes the sum of all before it; returns the sum of all.
__device__ inline int sum_before(Smem& smem, int* numbers) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto sum_up_to_lane = [&](int sum) {
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kWarp, sum, step);
      sum += lane >= step ? other : 0;
    }
    return sum;
  };
  const int own = numbers[threadIdx.x], sum = sum_up_to_lane(own);
  if (lane == 31) smem.sums[warp] = sum;
  __syncthreads();
  const int of_warps = sum_up_to_lane(smem.sums[lane]);
  const int before = __shfl_sync(kWarp, of_warps, max(warp - 1, 0));
  numbers[threadIdx.x] = (warp > 0 ? before : 0) + sum - own;
  __syncthreads();
  return __shfl_sync(kWarp, of_warps, 31);
}

template <class C, bool kKeys>
__device__ inline void list_tiles(const ForwardParams& p, Smem& smem, int h) {
  static_assert(kThreads == kSteps && kThreads == kSections * kClasses && kThreads == 32 * C::kWarps);
  auto* const list = static_cast<TileList*>(kKeys ? p.key_tiles : p.row_tiles);
  const int size = kKeys ? p.tile_keys : p.tile_rows, heads = kKeys ? p.num_heads_kv : p.num_heads_q;

  smem.tiles[threadIdx.x] = smem.tokens[threadIdx.x] = 0;
  if (threadIdx.x < kSections) smem.section_tokens[threadIdx.x] = 0;
  __syncthreads();
  for (int b = static_cast<int>(threadIdx.x) - 1; b <= p.batch; b += kThreads) {
    const int tokens = Side<kKeys>::passing(sequence_of<C>(p, b));
    atomicAdd(&smem.tokens[step_of(tokens)], tokens);
  }
  __syncthreads();
  const int tokens = sum_before(smem, smem.tokens);
  if (threadIdx.x == 0) smem.tokens[kSteps] = tokens;
  __syncthreads();

  auto count_up = [&](const PackedSequence& s, int section, int block) {
    return atomicAdd(&smem.tiles[section * kClasses + class_of<C, kKeys>(p, s, block, size)], 1);
  };
  for_each_tile<C, kKeys>(p, smem, size, [&](const PackedSequence& s, int, int section, int block) {
    count_up(s, section, block);
    if (block == 0) atomicAdd(&smem.section_tokens[section], Side<kKeys>::passing(s));
  });
  const int count = sum_before(smem, smem.tiles);
  const bool fits = count <= most_tiles(kKeys ? p.seqlen_k : p.seqlen_q, p.batch, size);
  if (h == 0 && threadIdx.x == 0) {
    list->count = fits ? count * heads : 0;
    list->taken = 0;
  }
  if (!fits) return;
  if (threadIdx.x <= kSections) smem.section_first[threadIdx.x] = threadIdx.x < kSections ? smem.tiles[threadIdx.x * kClasses] : count;
  __syncthreads();

  for_each_tile<C, kKeys>(p, smem, size, [&](const PackedSequence& s, int b, int section, int block) {
    const int place = count_up(s, section, block);
    const int first = smem.section_first[section], tiles = smem.section_first[section + 1] - first;
    const int groups = max((smem.section_tokens[section] + p.section - 1) / p.section, 1);
    const int together = (heads + groups - 1) / groups, first_head = h - h % together;  // heads at a time
    const int of_head = (place - first) * min(together, heads - first_head) + h - first_head;
    list->tiles[first * heads + tiles * first_head + of_head] =
        ListedTile{(b + 1) * heads + h, first_of<C, kKeys>(s, block, size), s.used_q, s.used_k, s.first_q, s.first_k, s.len_q, s.len_k};
  });
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 1) packed_tiles(const __grid_constant__ cupyflash::ForwardParams p) {
  __shared__ cupyflash::Smem smem;
  const int heads = p.row_tiles ? p.num_heads_q : 0, h = blockIdx.x;
  if (h < heads) {
    cupyflash::list_tiles<Config, false>(p, smem, h);
  } else {
    cupyflash::list_tiles<Config, true>(p, smem, h - heads);
  }
}
