// parts.cuh: how blocks share the keys of all sequences, and how the parts of something are merged. decode.cu says it whole.
#pragma once

#include "decode.cuh"

namespace cupyflash {

// Packed, numbers -1 and B are tokens of no sequence, whose results are zeros.
template <class C>
__device__ inline int num_sequences(const ForwardParams& p) {
  return p.batch + (C::kPacked ? 2 : 0);
}
template <class C>
__device__ inline int sequence_number(int n) {
  return n - (C::kPacked ? 1 : 0);
}

// The row of pieces, and a team's share of it: the first `more` teams have one more than the others.
struct Share {
  unsigned each = 0, more = 0;
  int begin = 0, end = 0;

  Share() = default;
  __device__ Share(int total, int team, int most) {
    const unsigned teams = max(min(total, most), 1);
    each = total / teams;
    more = total - each * teams;
    begin = begin_of(min(team, static_cast<int>(teams)));
    end = begin_of(min(team + 1, static_cast<int>(teams)));
  }
  __device__ int begin_of(int team) const { return each * team + min(static_cast<unsigned>(team), more); }
  __device__ int team_of(int piece) const {
    const unsigned longer = more * (each + 1);
    return piece < longer ? piece / (each + 1) : more + (piece - longer) / each;
  }
};

// Scope: block. Finds a piece or, kByItems, an item, which target(pieces in all, items in all) names. Up to 32 sequences each warp looks at
// by itself.
template <class C, bool kByItems, class Target>
__device__ inline Place find(const ForwardParams& p, Shared<C>& shared, Target target) {
  constexpr int kThreads = 32 * C::kWarps, kSums = kByItems ? 2 : 1, kBy = kSums - 1;
  const int lane = threadIdx.x % 32, count = num_sequences<C>(p);
  const bool alone = count <= 32;
  const int each = alone ? 1 : (count + kThreads - 1) / kThreads, first = (alone ? lane : threadIdx.x) * each;
  int mine[kSums] = {}, before[kSums], total[kSums];  // pieces, items
#pragma unroll 1
  for (int n = first; n < min(first + each, count); ++n) {
    const Extent<C> e(p, sequence_number<C>(n));
    mine[0] += e.weight(p);
    if (kByItems) mine[kBy] += e.items(p);
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    before[s] = mine[s];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int more = __shfl_up_sync(kWarp, before[s], distance);
      before[s] += lane >= distance ? more : 0;
    }
    total[s] = __shfl_sync(kWarp, before[s], 31);
    before[s] -= mine[s];
    if (!alone) {
      if (lane == 31) shared.weights[threadIdx.x / 32] = total[s];
      __syncthreads();
      total[s] = 0;
      for (int w = 0; w < C::kWarps; ++w) {
        before[s] += w < threadIdx.x / 32 ? shared.weights[w] : 0;
        total[s] += shared.weights[w];
      }
      if (kByItems) __syncthreads();
    }
  }
  const int wanted = target(total[0], total[kBy]);
  const bool here = before[kBy] <= wanted && wanted < before[kBy] + mine[kBy];
  if (kByItems && wanted >= total[kBy]) return {-1, 0, 0};
  if (alone) {
    const int at = max(__ffs(__ballot_sync(kWarp, here)) - 1, 0);
    return {at, wanted - __shfl_sync(kWarp, before[kBy], at), __shfl_sync(kWarp, before[0], at)};
  }
  if (here) {
    int n = first;
    for (;; ++n) {
      const Extent<C> e(p, sequence_number<C>(n));
      const int counted = kByItems ? e.items(p) : e.weight(p);
      if (wanted - before[kBy] < counted) break;
      before[0] += e.weight(p);
      if (kByItems) before[kBy] += counted;
    }
    shared.found = {n, wanted - before[kBy], before[0]};
  }
  __syncthreads();
  return shared.found;
}

// The parts of an item that more than one team has. They are numbered by their piece; or by their team, which has two at most: what it
// begins with, and what it ends with.
template <class C>
struct Parts {
  Share share;
  int heads, own_head;      // of a team, and which of them
  int first, begin, count;  // piece, the team that has it, and how many parts

  // `begin` is the team that has the first of the item's pieces.
  __device__ Parts(const Share& share, int heads, int own_head, int first, int pieces, int begin)
      : share(share),
        heads(heads),
        own_head(own_head),
        first(first),
        begin(C::kSplits ? first : begin),
        count(C::kSplits ? pieces : share.team_of(first + pieces - 1) - begin + 1) {}
  __device__ int of_team(int team) const { return (2 * team + (share.begin_of(team) < first ? 1 : 0)) * heads + own_head; }
  __device__ int operator()(int part) const { return C::kSplits ? (first + part) * heads + own_head : of_team(begin + part); }
};

// Scope: thread. A part goes to memory: O divided by its sum, and its LSE.
template <class C>
__device__ inline void leave_part(const ForwardParams& p, long long slot, const Merged<C>& merged) {
  const float scale = merged.empty() ? 0.0f : 1.0f / merged.sum;
  unsigned x[4];
  for (int c = 0; c < 4; ++c) x[c] = __float_as_uint(merged.out[c] * scale);  // NaN, where all scores are: whoever merges must see it
  global_store_16(p.part_out + (slot * C::kBlockM + merged.row) * C::kHeadDimV + merged.column, x);
  if (merged.column == 0) p.part_lse[slot * C::kBlockM + merged.row] = merged.lse();
}

// Scope: thread. All parts, which other blocks wrote as well. So many are on their way at once: one after the other, 33 parts took some
// 8 us more.
template <class C>
__device__ inline Merged<C> merge_parts(const ForwardParams& p, int item, const Parts<C>& parts) {
  constexpr int kAtOnce = 16;
  const int count = parts.count;
  Merged<C> merged(item);
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float lse[kAtOnce], x[kAtOnce][4], top = -infinity(0.0f);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      lse[n] = -infinity(0.0f);
      for (float& one : x[n]) one = 0.0f;
      if (first + n < count) {
        const long long row = static_cast<long long>(parts(first + n)) * C::kBlockM + merged.row;
        lse[n] = global_load_l2(p.part_lse + row);
        global_load_l2_4(x[n], p.part_out + row * C::kHeadDimV + merged.column);
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) top = fmaxf(top, lse[n]);
    merged.raise(top);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) merged.add(lse[n], 1.0f, x[n]);
  }
  return merged;
}

// Whether a kernel of its own merges the parts: those of latent heads are 128 kB each, and one block took 160 us for 66 of them.
template <class C>
constexpr bool kMergedApart = C::kKeyWarps != C::kWarps;

// Scope: block. What it has of all sequences; compute(e, g) leaves O, references and sums of a segment in shared memory.
template <class C, class Compute>
__device__ inline void decode(const ForwardParams& p, Smem<C>& smem, Compute compute) {
  constexpr int kThreads = 32 * C::kWarps;
  const int heads = p.section, team = blockIdx.x / heads, own_head = blockIdx.x - team * heads;
  Share share;
  const Place start = find<C, false>(p, smem.shared, [&](int pieces, int) {
    share = Share(pieces, team, gridDim.x / heads);
    return share.begin;
  });
  if (share.begin >= share.end) return;
  int n = start.sequence, inside = start.inside;
  for (int piece = share.begin; piece < share.end;) {
    const int b = sequence_number<C>(n);
    const Extent<C> e(p, b);
    const int weight = e.weight(p);
    if (inside >= weight) {
      inside -= weight;
      ++n;
      continue;
    }
    const int item = weight == e.pieces ? 0 : inside / e.pieces, from = inside - item * e.pieces;
    const int count = C::kSplits ? 1 : min(e.pieces - from, share.end - piece);  // each split is a part
    const int unit = e.first_unit + from * e.piece_units, last_unit = min(unit + count * e.piece_units, e.first_unit + e.units);
    const Segment<C> g = segment_of(e, b, item, heads, own_head, unit, last_unit);
    if (threadIdx.x == 0) smem.shared.lost.clear();
    load_queries<C>(p, e, g, smem);
    compute(e, g);

    const int first = piece - from;
    bool done = count == e.pieces;
    const Parts<C> parts(share, heads, own_head, first, e.pieces, done || first >= share.begin ? team : share.team_of(first));
    const int own_slot = C::kSplits ? parts(from) : parts.of_team(team);
    for (bool of_parts = false;; of_parts = true) {  // short code again: what the warps have, then perhaps what all blocks have
#pragma unroll 1
      for (int m = threadIdx.x; m < min(e.rows - g.row, C::kBlockM) * Merged<C>::kOfRow; m += kThreads) {
        const Merged<C> merged = of_parts ? merge_parts<C>(p, m, parts) : merge_warps<C>(smem, m);
        if (done) {
          write<C>(p, e, g, merged, smem.shared.lost);
        } else {
          leave_part<C>(p, own_slot, merged);
        }
      }
      if (done || kMergedApart<C>) break;
      __syncthreads();
      if (threadIdx.x == 0) {
        int* const arrived = p.arrived + parts.begin * heads + own_head;
        smem.shared.is_last = count_up(arrived) == parts.count - 1;
        if (smem.shared.is_last) *arrived = 0;
      }
      __syncthreads();
      if (!smem.shared.is_last) break;
      done = true;
    }
    __syncthreads();
    if (smem.shared.lost.any()) write_lost<C>(p, g, smem.shared.lost);
    __syncthreads();  // all have done with the results before the next keys come
    piece += count;
    inside += count;
  }
}

// Scope: block. Rows of an item whose parts `decode` has left: as many blocks share one as there are. `teams` is how many there were.
template <class C>
__device__ inline void merge_item(const ForwardParams& p, Shared<C>& shared, int teams) {
  constexpr int kThreads = 32 * C::kWarps;
  const int heads = p.section;
  int index = 0, slice = 0, rows = C::kBlockM;
  Share share;
  const Place place = find<C, true>(p, shared, [&](int pieces, int items) {
    share = Share(pieces, 0, teams);
    for (int blocks = gridDim.x / max(items * heads, 1); blocks > 1 && rows > 2; blocks /= 2) rows /= 2;
    const int slices = C::kBlockM / rows;
    index = blockIdx.x / slices;
    slice = blockIdx.x - index * slices;
    return index / heads;
  });
  if (place.sequence < 0) return;
  const int b = sequence_number<C>(place.sequence), own_head = index % heads;
  const Extent<C> e(p, b);
  const int first = place.before + place.inside * e.pieces;
  const Parts<C> parts(share, heads, own_head, first, e.pieces, share.team_of(first));
  if (parts.count == 1) return;
  const Segment<C> g = segment_of(e, b, place.inside, heads, own_head, 0, 0);
  if (threadIdx.x == 0) shared.lost.clear();
  __syncthreads();
  const int begin = slice * rows * Merged<C>::kOfRow, end = min(e.rows - g.row, (slice + 1) * rows) * Merged<C>::kOfRow;
#pragma unroll 1
  for (int m = begin + threadIdx.x; m < end; m += kThreads) write<C>(p, e, g, merge_parts<C>(p, m, parts), shared.lost);
  __syncthreads();
  if (shared.lost.any()) write_lost<C>(p, g, shared.lost);
}

}  // namespace cupyflash
