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
// Work       Three passes by the same code. A lane looks at a sequence, and its warp deals the tiles of all of its sequences to its lanes,
//            so that a long sequence among many short ones takes no longer. What takes time is 800 instructions that wait for one another,
//            and in a block of 32 warps for their turn to be issued: 64 x 512 tokens take 7.0 us by 8 warps, and 10.1 by 32.
// Edges      Tokens before the first sequence and behind the last one are tiles as well: their results are zeros. Offsets that fall
//            may make more tiles than there is room for, and then none is listed.
#include "../primitives/work.cuh"

namespace cupyflash {

constexpr int kThreads = 256, kSteps = 1024;
constexpr int kSections = 64, kClasses = 16;  // plan.py keeps to so many sections

// The tile at place n among a head's, all sections after one another, is at from + n * heads of the list.
struct Section {
  int from, heads;
};

struct Smem {
  alignas(16) int tiles[kSections * kClasses];  // of a section and class; then where the next one of them goes
  alignas(16) int tokens[kSteps + 1];           // of sequences of a length; then of all longer ones
  int section_tokens[kSections];
  Section sections[kSections];
  int sums[kThreads / 32];
};

// What the tiles of a list are tiles of, and what they pass by.
template <bool kKeys>
struct Side {
  static __device__ int length(const PackedSequence& s) { return kKeys ? s.len_k : s.len_q; }
  static __device__ int passing(const PackedSequence& s) { return kKeys ? s.used_q : s.used_k; }
};

// Longer sequences have smaller numbers.
__device__ inline int step_of(int length) { return kSteps - 1 - ((__float_as_int(static_cast<float>(length + 1)) >> 18) - (127 << 5)); }

// Longer tiles of a sequence have smaller numbers: by how much of what passes by meets the tile.
template <class C, bool kKeys>
__device__ inline int class_of(const ForwardParams& p, const PackedSequence& s, int first, int size) {
  const int end = first + size;
  int met = 0;
  if (kKeys && first < s.used_k) {
    const RowRange rows = visible_rows<C>(p, s, first, min(end, s.used_k));
    met = max(rows.last - rows.first, 0);
  } else if (!kKeys && first < s.used_q) {
    const KeyRange keys = visible_keys<C>(p, s, max(first, 0), min(end, s.used_q));
    met = max(keys.last - keys.first, 0);
  }
  return static_cast<int>((kClasses - 1) * (1 - __fdividef(static_cast<float>(met), static_cast<float>(max(Side<kKeys>::passing(s), 1)))));
}

// Sequences of a step are taken for evenly spread over all.
template <bool kKeys>
__device__ inline int section_of(const ForwardParams& p, const Smem& smem, const PackedSequence& s, int b) {
  const int own = Side<kKeys>::passing(s), step = step_of(own), before = smem.tokens[step];
  const float others = static_cast<float>(smem.tokens[step + 1] - before - own);
  const float first = static_cast<float>(before) + others * __fdividef(static_cast<float>(b + 1), static_cast<float>(p.batch + 2));
  return clamp(static_cast<int>(__fdividef(first, static_cast<float>(p.section))), 0, kSections - 1);
}

// Scope: warp. The sum of the numbers of this lane and those before it.
__device__ inline int sum_up_to_lane(int sum) {
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kWarp, sum, step);
    sum += static_cast<int>(threadIdx.x % 32) >= step ? other : 0;
  }
  return sum;
}

// Scope: block. Each of 4 * kThreads numbers becomes the sum of all before it; returns the sum of all.
__device__ inline int sum_before(Smem& smem, int* numbers) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto& four = reinterpret_cast<Elements<int, 4>*>(numbers)[threadIdx.x];
  const Elements<int, 4> own = four;
  const int all = own.x[0] + own.x[1] + own.x[2] + own.x[3], sum = sum_up_to_lane(all);
  if (lane == 31) smem.sums[warp] = sum;
  __syncthreads();
  const int of_warps = sum_up_to_lane(lane < kThreads / 32 ? smem.sums[lane] : 0);
  const int before = __shfl_sync(kWarp, of_warps, max(warp - 1, 0)), first = (warp > 0 ? before : 0) + sum - all;
  four = {first, first + own.x[0], first + own.x[0] + own.x[1], first + all - own.x[3]};
  __syncthreads();
  return __shfl_sync(kWarp, of_warps, 31);
}

// Where the tiles of a section go that are head h's: `first` of each head come before them. As many heads as keep to p.section tokens take
// turns.
__device__ inline Section section_at(const ForwardParams& p, int tokens, int first, int tiles, int heads, int h) {
  const int groups = max((tokens + p.section - 1) / p.section, 1), together = (heads + groups - 1) / groups;
  const int first_head = h - h % together, width = min(together, heads - first_head);
  return {first * heads + tiles * first_head + h - first_head - first * width, width};
}

template <class C, bool kKeys>
__device__ inline void list_tiles(const ForwardParams& p, Smem& smem, int h) {
  static_assert(4 * kThreads == kSteps && kSteps == kSections * kClasses && kThreads == 32 * C::kWarps);
  auto* const list = static_cast<TileList*>(kKeys ? p.key_tiles : p.row_tiles);
  const int size = kKeys ? p.tile_keys : p.tile_rows, heads = kKeys ? p.num_heads_kv : p.num_heads_q;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sequences = p.batch + 2;

  reinterpret_cast<Elements<int, 4>*>(smem.tiles)[threadIdx.x] = {};
  reinterpret_cast<Elements<int, 4>*>(smem.tokens)[threadIdx.x] = {};
  if (threadIdx.x < kSections) smem.section_tokens[threadIdx.x] = 0;
  __syncthreads();
  enum { kTokens, kTiles, kPlaces };
  ListedTile own;  // the first tile of the lane's sequence
  int count;
#pragma unroll 1
  for (int pass = kTokens;; ++pass) {
#pragma unroll 1
    for (int begin = 0; begin < sequences; begin += kThreads) {
      const int each = (min(sequences - begin, kThreads) + C::kWarps - 1) / C::kWarps;  // for each warp a few
      const int n = begin + warp * each + lane;
      if (pass == kTokens || sequences > kThreads) {
        PackedSequence s = {};
        if (lane < each && n < sequences) s = sequence_of<C>(p, n - 1);
        count = (Side<kKeys>::length(s) + size - 1) / size;
        own = {n * heads + h, 0, s.used_q, s.used_k, s.first_q, s.first_k, s.len_q, s.len_k};
        if (C::kFromLast && !kKeys) own.first = s.len_q - count * size;
      }
      const PackedSequence s = own.sequence(p);
      const int tokens = Side<kKeys>::passing(s);
      if (pass == kTokens) {
        if (tokens > 0) atomicAdd(&smem.tokens[step_of(tokens)], tokens);
        continue;
      }
      const int section = section_of<kKeys>(p, smem, s, n - 1);
      if (pass == kTiles && count > 0) atomicAdd(&smem.section_tokens[section], tokens);

      const int end = sum_up_to_lane(count), all = __shfl_sync(kWarp, end, 31);
#pragma unroll 1
      for (int t = lane; t - lane < all; t += 32) {
        int whose = 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) whose += __shfl_sync(kWarp, end, whose + step - 1) <= t ? step : 0;
        ListedTile tile;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          reinterpret_cast<int*>(&tile)[i] = __shfl_sync(kWarp, reinterpret_cast<const int*>(&own)[i], whose);
        }
        tile.first += (t - __shfl_sync(kWarp, end - count, whose)) * size;
        const int its_section = __shfl_sync(kWarp, section, whose);
        if (t < all) {
          const int place = atomicAdd(&smem.tiles[its_section * kClasses + class_of<C, kKeys>(p, tile.sequence(p), tile.first, size)], 1);
          if (pass == kPlaces) list->tiles[smem.sections[its_section].from + place * smem.sections[its_section].heads] = tile;
        }
      }
    }
    if (pass == kPlaces) return;
    __syncthreads();
    const int sum = sum_before(smem, pass == kTokens ? smem.tokens : smem.tiles);
    if (pass == kTokens) {
      if (threadIdx.x == 0) smem.tokens[kSteps] = sum;
    } else {
      const bool fits = sum <= most_tiles(kKeys ? p.seqlen_k : p.seqlen_q, p.batch, size);
      if (h == 0 && threadIdx.x == 0) {
        list->count = fits ? sum * heads : 0;
        list->taken = 0;
      }
      if (!fits) return;
      if (threadIdx.x < kSections) {
        const int first = smem.tiles[threadIdx.x * kClasses];
        const int end = threadIdx.x + 1 < kSections ? smem.tiles[(threadIdx.x + 1) * kClasses] : sum;
        smem.sections[threadIdx.x] = section_at(p, smem.section_tokens[threadIdx.x], first, end - first, heads, h);
      }
    }
    __syncthreads();
  }
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
