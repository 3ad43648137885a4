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

// What one block works on.
template <class C>
struct Work {
  int b, h, row;  // row: the first of the block
  Sequence s;
  ScoreContext<C> context;
  int key_first, key_last;    // key blocks that some row sees
  int full_first, full_last;  // those among them that every row sees whole, by length, causal and window

  // `head` counts through all batches.
  __device__ Work(const ForwardParams& p, int head, int row_block) : row(row_block * C::kBlockM) {
    b = head / p.num_heads_q;
    h = head % p.num_heads_q;
    s = sequence_of<C>(p, b);
    context = score_context<C>(p, b, h);
    const int row_end = min(row + C::kBlockM, s.used_q);
    KeyRange keys = visible_keys<C>(p, s, row, row_end);
    if (row >= s.used_q) keys.last = keys.first;
    key_first = keys.first / C::kBlockN;
    key_last = keys.first < keys.last ? (keys.last + C::kBlockN - 1) / C::kBlockN : key_first;
    keys = keys_of_all<C>(p, s, row, row_end);
    full_first = (keys.first + C::kBlockN - 1) / C::kBlockN;
    full_last = keys.last / C::kBlockN;
  }

  __device__ bool is_full(int j) const { return j >= full_first && j < full_last; }
};

// Writes two neighbouring elements of a row that is `width` wide, where they exist; `target` is that of `column`.
template <bool kUnaligned, class T>
__device__ inline void store_pair(T* target, int column, int width, float low, float high) {
  T pair[2];
  narrow(low, pair[0]);
  narrow(high, pair[1]);
  if (!kUnaligned && column + 1 < width) {
    *reinterpret_cast<PairOf<sizeof(T)>*>(target) = *reinterpret_cast<PairOf<sizeof(T)>*>(pair);
  } else {
    if (column < width) target[0] = pair[0];
    if (column + 1 < width) target[1] = pair[1];
  }
}

}  // namespace cupyflash
