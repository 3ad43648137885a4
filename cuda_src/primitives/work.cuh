// work.cuh: what one block of a tiled kernel works on: which keys its rows meet, how q.k becomes the score of a softmax, and how results
// are written. Accumulators lie as mma.cuh and wgmma.cuh have them.
#pragma once

#include "ptx.cuh"
#include "row.cuh"

namespace cupyflash {

inline constexpr float kLargestReference = 4194304.0f;  // 2^22: beyond it, rounding a score's reference moves P by more than 2^(1/4)

// Without softcap, ALiBi and bias a score is scale * q.k, and the scale joins the exponent: one FFMA an element.
template <class C>
constexpr bool kFused = !(C::kSoftcap || C::kAlibi || C::kBias);

// From q.k to the score that joins the exponent, in place: q.k itself where the scale joins there (kFused), else in log2 units; -inf for a
// pair that is not visible. kMasked: it may not be, by length, causal or window. No memory is read for a pair that does not exist.
template <class C, bool kMasked>
__device__ inline void score_of(const ForwardParams& p, const ScoreContext<C>& context, const Sequence& s, float& score, int i, int key) {
  const bool exists = (!kMasked || key < s.used_k) && ((!kMasked && !C::kBias && !C::kMask) || i < s.used_q);
  if constexpr (!kFused<C>) {
    if (exists) score = score_step<C>(p, context, s, score, i, key) * static_cast<float>(kLog2E);
  }
  if constexpr (kMasked || C::kMask) {
    if (!(exists && is_visible<C>(p, context, s, i, key))) score = -infinity(0.0f);
  }
}

// The key blocks [first, last) that some row of a range sees, and those among them that every row sees whole.
struct KeyBlocks {
  int first, last, full_first, full_last;
  __device__ bool is_full(int j) const { return j >= full_first && j < full_last; }
  __device__ bool empty() const { return first == last; }
};

template <class C>
__device__ inline KeyBlocks key_blocks(const ForwardParams& p, Sequence s, int row, int rows) {
  const int row_end = min(row + rows, s.used_q);
  row = max(row, 0);
  KeyRange some = visible_keys<C>(p, s, row, row_end);
  if (row >= row_end) some.last = some.first;
  const KeyRange all = keys_of_all<C>(p, s, row, row_end);
  KeyBlocks blocks;
  blocks.first = some.first / C::kBlockN;
  blocks.last = some.first < some.last ? (some.last + C::kBlockN - 1) / C::kBlockN : blocks.first;
  blocks.full_first = (all.first + C::kBlockN - 1) / C::kBlockN;
  blocks.full_last = all.last / C::kBlockN;
  return blocks;
}

// What one block works on.
template <class C>
struct Work {
  int b, h, row;  // row: the first of the block; fwd_sm90 has some before row 0, which there are none of
  SequenceOf<C> s;
  ScoreContext<C> context;
  KeyBlocks keys;

  Work() = default;
  // `head` counts through all batches.
  __device__ Work(const ForwardParams& p, int head, int row) : Work(p, head / p.num_heads_q, head % p.num_heads_q, row) {}
  __device__ Work(const ForwardParams& p, int b, int h, int row) : Work(p, b, h, row, sequence_of<C>(p, b)) {}
  __device__ Work(const ForwardParams& p, int b, int h, int row, const SequenceOf<C>& s) : b(b), h(h), row(row), s(s) {
    context = score_context<C>(p, b, h);
    keys = key_blocks<C>(p, s, row, C::kBlockM);
  }
};

// The tiles of a packed call in the order of packed_tiles.cu: of which sequence and head, and what is known of the sequence.
struct alignas(16) ListedTile {
  int head, first;  // row, or key. The head counts through all sequences, from number -1 on: 32 bytes are what kernels have registers for
  int used_q, used_k, first_q, first_k, len_q, len_k;

  __device__ int b(int heads) const { return head / heads - 1; }
  __device__ int h(int heads) const { return head % heads; }
  __device__ PackedSequence sequence(const ForwardParams& p) const {
    return {{used_q, used_k, p.top_left ? 0 : used_k - used_q}, first_q, first_k, len_q, len_k};
  }
};
struct alignas(16) TileList {
  int count;
  int taken;  // beyond a block's first, by blocks that ask for tile after tile
  ListedTile tiles[1];
};
// How many tiles of a head packed sequences have at most, each of its own first token on, and what lies before and behind them all.
__device__ inline int most_tiles(int tokens, int sequences, int size) { return tokens / size + min(sequences + 2, tokens); }

// Whether there is a tile for this block of a kernel whose blocks compute one each: of packed sequences the host knows only how many there
// are at most.
template <class C>
__device__ inline bool has_work(const ForwardParams& p) {
  if constexpr (C::kPacked) return blockIdx.x < static_cast<const TileList*>(p.row_tiles)->count;
  return true;
}
// The tile of a block of rows.
template <class C>
__device__ inline Work<C> row_work(const ForwardParams& p) {
  if constexpr (C::kPacked) {
    const ListedTile tile = static_cast<const TileList*>(p.row_tiles)->tiles[blockIdx.x];
    return Work<C>(p, tile.b(p.num_heads_q), tile.h(p.num_heads_q), tile.first, tile.sequence(p));
  } else {
    const int row_blocks = (p.seqlen_q + C::kBlockM - 1) / C::kBlockM;
    const int row_block = row_blocks - 1 - blockIdx.x % row_blocks;  // as an int: else bwd_sm80_dq spills 8 bytes
    return Work<C>(p, blockIdx.x / row_blocks, row_block * C::kBlockM);
  }
}

// Rows of the sums of dQ of a head that lie before those of a sequence, in whole tiles, or panels of 64 rows. A kernel may add its zeros
// for rows past the end of a sequence to those of the next one; where they are NaN, of a K that is not finite, bwd_convert computes again.
template <class C>
__device__ inline int sum_rows_before(const SequenceOf<C>& s, int b) {
  constexpr int kWhole = C::kPanels ? 64 : 16;
  if constexpr (C::kPacked) return (s.first_q + kWhole * (b + 1)) / kWhole * kWhole;
  return 0;
}

// Which `rows` rows of the `length` of one head a block takes whose warps share nothing. Heads pass by first, then rows: where the rows of
// a head are 128 bytes in 4096, as in (B, S, H, D), the blocks that run at the same time read and write whole rows of all heads.
struct HeadRows {
  int b, h, row;  // row: the first of the block
  __device__ HeadRows(const ForwardParams& p, int rows, int length) {
    const unsigned heads = p.num_heads_q, row_blocks = (length + rows - 1) / rows;
    const unsigned block = blockIdx.x / heads;
    h = blockIdx.x % heads;
    b = block / row_blocks;
    row = block % row_blocks * rows;
  }
};

// Neighbouring elements that one instruction reads or writes.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Elements {
  T x[kCount];
};

// Two neighbouring elements of a result.
template <class Out>
struct alignas(2 * sizeof(Out)) Pair {
  Out low, high;
};
template <class Out>
__device__ inline Pair<Out> narrow_pair(float low, float high) {
  Pair<Out> pair;
  if constexpr (sizeof(Out) == 2) {
    *reinterpret_cast<unsigned*>(&pair) = pack(low, high, Out{});
  } else {
    narrow(low, pair.low);
    narrow(high, pair.high);
  }
  return pair;
}
// Writes two neighbouring elements of a row that is `width` wide, where they exist; `target` is that of `column`.
template <bool kUnaligned, class T>
__device__ inline void store_pair(T* target, int column, int width, Pair<T> pair) {
  if (!kUnaligned && column + 1 < width) {
    *reinterpret_cast<Pair<T>*>(target) = pair;
  } else {
    if (column < width) target[0] = pair.low;
    if (column + 1 < width) target[1] = pair.high;
  }
}

}  // namespace cupyflash
