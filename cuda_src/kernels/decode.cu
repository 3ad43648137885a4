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
#include "../primitives/decode.cuh"

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
    if (lane == 31) smem.weights[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
    for (int w = 0; w < C::kWarps; ++w) {
      before += w < threadIdx.x / 32 ? smem.weights[w] : 0;
      total += smem.weights[w];
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
    smem.first_sequence = n;
    smem.first_inside = share.begin - before;
  }
  __syncthreads();
  start = {smem.first_sequence, smem.first_inside};
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

// Scope: block.
template <class C>
__device__ inline void decode(const ForwardParams& p, Smem<C>& smem) {
  constexpr int kThreads = 32 * C::kWarps;
  static_assert(C::kBlockM == 16, "rows of one mma");
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
    if (threadIdx.x == 0) smem.lost = 0;
    load_queries<C>(p, e, g, smem);
    compute<C>(p, e, g, smem);

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
          write<C>(p, e, g, merged, smem.lost);
        } else {
          leave_part<C>(p, own_slot, merged);
        }
      }
      if (done) break;
      __syncthreads();
      if (threadIdx.x == 0) {
        int* const arrived = p.arrived + first_team * heads + own_head;
        smem.is_last = count_up(arrived) == parts - 1;
        if (smem.is_last) *arrived = 0;
      }
      __syncthreads();
      if (!smem.is_last) break;
      done = true;
    }
    __syncthreads();
    if (smem.lost) write_lost<C>(p, g, smem.lost);
    __syncthreads();  // all have done with the results before the next keys come
    piece += count;
    inside += count;
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, Config::kBlocks)
    decode(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::decode<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
