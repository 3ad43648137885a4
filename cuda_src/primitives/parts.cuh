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
  unsigned each, more;
  int begin, end;

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

// Where a team begins: in which sequence, and how many of its pieces lie before.
struct Start {
  int sequence, inside;
};

// Scope: block. How many pieces there are, and where the team begins. Up to 32 sequences each warp looks at by itself.
template <class C>
__device__ inline Share find_share(const ForwardParams& p, Smem<C>& smem, int team, int teams, Start& start) {
  constexpr int kThreads = 32 * C::kWarps;
  const int lane = threadIdx.x % 32, count = num_sequences<C>(p);
  const bool alone = count <= 32;
  const int each = alone ? 1 : (count + kThreads - 1) / kThreads, first = (alone ? lane : threadIdx.x) * each;
  int mine = 0;
#pragma unroll 1
  for (int n = first; n < min(first + each, count); ++n) mine += Extent<C>(p, sequence_number<C>(n)).weight(p);
  int before = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int more = __shfl_up_sync(kWarp, before, distance);
    before += lane >= distance ? more : 0;
  }
  int total = __shfl_sync(kWarp, before, 31);
  before -= mine;
  if (!alone) {
    if (lane == 31) smem.shared.weights[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
    for (int w = 0; w < C::kWarps; ++w) {
      before += w < threadIdx.x / 32 ? smem.shared.weights[w] : 0;
      total += smem.shared.weights[w];
    }
  }
  const Share share(total, team, teams);
  const bool here = share.begin < share.end && before <= share.begin && share.begin < before + mine;
  if (alone) {
    const int at = max(__ffs(__ballot_sync(kWarp, here)) - 1, 0);
    start = {at, share.begin - __shfl_sync(kWarp, before, at)};
    return share;
  }
  if (here) {
    int n = first;
    for (int weight; (weight = Extent<C>(p, sequence_number<C>(n)).weight(p)) <= share.begin - before; ++n) before += weight;
    smem.shared.first_sequence = n;
    smem.shared.first_inside = share.begin - before;
  }
  __syncthreads();
  start = {smem.shared.first_sequence, smem.shared.first_inside};
  return share;
}

// Scope: thread. A part goes to memory: O divided by its sum, and its LSE.
template <class C>
__device__ inline void leave_part(const ForwardParams& p, long long slot, const Merged<C>& merged) {
  const float scale = merged.empty() ? 0.0f : 1.0f / merged.sum;
  unsigned x[4];
  for (int c = 0; c < 4; ++c) x[c] = __float_as_uint(merged.empty() ? 0.0f : merged.out[c] * scale);
  global_store_16(p.part_out + (slot * C::kBlockM + merged.row) * C::kHeadDimV + merged.column, x);
  if (merged.column == 0) p.part_lse[slot * C::kBlockM + merged.row] = merged.lse();
}

// Scope: thread. All parts, which other blocks wrote as well; slot(n) says where part n is. So many are on their way at once: one after the
// other, 33 parts took some 8 us more.
template <class C, class Slot>
__device__ inline Merged<C> merge_parts(const ForwardParams& p, int item, int count, Slot slot) {
  constexpr int kAtOnce = 16;
  Merged<C> merged(item);
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float lse[kAtOnce], x[kAtOnce][4];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const long long row = static_cast<long long>(slot(min(first + n, count - 1))) * C::kBlockM + merged.row;
      lse[n] = global_load_l2(p.part_lse + row);
      global_load_l2_4(x[n], p.part_out + row * C::kHeadDimV + merged.column);
    }
    float top = -infinity(0.0f);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n >= count) lse[n] = -infinity(0.0f);
      top = fmaxf(top, lse[n]);
    }
    merged.raise(top);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) merged.add(lse[n], 1.0f, x[n]);
  }
  return merged;
}

// Scope: block. What it has of all sequences; compute(e, g) leaves O, references and sums of a segment in shared memory.
template <class C, class Compute>
__device__ inline void decode(const ForwardParams& p, Smem<C>& smem, Compute compute) {
  constexpr int kThreads = 32 * C::kWarps;
  const int heads = p.section, team = blockIdx.x / heads, own_head = blockIdx.x - team * heads;
  Start start;
  const Share share = find_share<C>(p, smem, team, gridDim.x / heads, start);
  if (share.begin >= share.end) return;
  constexpr bool kSplits = C::kSplits;  // each is a part
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
    const int count = kSplits ? 1 : min(e.pieces - from, share.end - piece);
    const int unit = e.first_unit + from * e.piece_units, last_unit = min(unit + count * e.piece_units, e.first_unit + e.units);
    const int head_group = e.row_blocks == 1 ? item : item / e.row_blocks, row = (item - head_group * e.row_blocks) * C::kBlockM;
    const Segment<C> g{b, head_group * heads + own_head, row, unit, last_unit};
    if (threadIdx.x == 0) smem.shared.lost.clear();
    load_queries<C>(p, e, g, smem);
    compute(e, g);

    // Parts are numbered by their piece; or by their team, which has two at most: what it begins with, and what it ends with.
    const int first = piece - from;
    bool done = count == e.pieces;
    const int first_team = done ? 0 : kSplits ? first : first >= share.begin ? team : share.team_of(first);
    const int parts = done ? 1 : kSplits ? e.pieces : share.team_of(first + e.pieces - 1) - first_team + 1;
    auto slot_of_team = [&](int team) { return 2 * team + (share.begin_of(team) < first ? 1 : 0); };
    auto slot = [&](int part) { return (kSplits ? first + part : slot_of_team(first_team + part)) * heads + own_head; };
    const int own_slot = (kSplits ? piece : slot_of_team(team)) * heads + own_head;
    for (bool of_parts = false;; of_parts = true) {  // short code again: what the warps have, then perhaps what all blocks have
#pragma unroll 1
      for (int m = threadIdx.x; m < min(e.rows - g.row, C::kBlockM) * Merged<C>::kOfRow; m += kThreads) {
        const Merged<C> merged = of_parts ? merge_parts<C>(p, m, parts, slot) : merge_warps<C>(smem, m);
        if (done) {
          write<C>(p, e, g, merged, smem.shared.lost);
        } else {
          leave_part<C>(p, own_slot, merged);
        }
      }
      if (done) break;
      __syncthreads();
      if (threadIdx.x == 0) {
        int* const arrived = p.arrived + first_team * heads + own_head;
        smem.shared.is_last = count_up(arrived) == parts - 1;
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

}  // namespace cupyflash
