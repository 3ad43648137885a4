// seqlen.cuh: the lengths of one batch entry, and which keys a query row may see.
//
// The diagonal of causal, windows and ALiBi is j = i + offset, with offset = used_k - used_q, or 0 for the top-left corner.
#pragma once

#include "params.cuh"
#include "types.cuh"

namespace cupyflash {

struct Sequence {
  int used_q, used_k, offset;
};

template <class C>
__device__ inline Sequence sequence_of(const ForwardParams& p, int b) {
  Sequence s{p.seqlen_q, p.seqlen_k, 0};
  if constexpr (C::kUsed) {
    if (p.seqused_q) s.used_q = clamp(p.seqused_q[b * p.seqused_q_stride], 0, p.seqlen_q);
    if (p.seqused_k) s.used_k = clamp(p.seqused_k[b * p.seqused_k_stride], 0, p.seqlen_k);
  }
  s.offset = p.top_left ? 0 : s.used_k - s.used_q;
  return s;
}

// The keys [first, last) that some row of [row, row_end) may see by causal, window and length.
struct KeyRange {
  int first, last;
};

template <class C>
__device__ inline KeyRange visible_keys(const ForwardParams& p, Sequence s, int row, int row_end) {
  KeyRange keys{0, s.used_k};
  if constexpr (C::kCausal) keys.last = clamp(row_end + s.offset, 0, s.used_k);
  if constexpr (C::kLocal) {  // 64-bit: an unlimited side is 2^31 - 1
    const long long first = static_cast<long long>(row) + s.offset - p.window_left;
    const long long last = static_cast<long long>(row_end) + s.offset + p.window_right;
    keys.first = first < 0 ? 0 : first > s.used_k ? s.used_k : static_cast<int>(first);
    keys.last = last < 0 ? 0 : last > s.used_k ? s.used_k : static_cast<int>(last);
  }
  return keys;
}

// The keys [first, last) that every row of [row, row_end) sees by causal, window and length.
template <class C>
__device__ inline KeyRange keys_of_all(const ForwardParams& p, Sequence s, int row, int row_end) {
  KeyRange keys{0, s.used_k};
  if constexpr (C::kCausal) keys.last = clamp(row + 1 + s.offset, 0, s.used_k);
  if constexpr (C::kLocal) {
    const long long first = static_cast<long long>(row_end) - 1 + s.offset - p.window_left;
    const long long last = static_cast<long long>(row) + 1 + s.offset + p.window_right;
    keys.first = first < 0 ? 0 : first > s.used_k ? s.used_k : static_cast<int>(first);
    keys.last = last < 0 ? 0 : last > s.used_k ? s.used_k : static_cast<int>(last);
  }
  return keys;
}

// The query rows [first, last) that may see key j < used_k by causal, window and length.
struct RowRange {
  int first, last;
};

template <class C>
__device__ inline RowRange visible_rows(const ForwardParams& p, Sequence s, int j) {
  RowRange rows{0, s.used_q};
  if constexpr (C::kCausal) rows.first = clamp(j - s.offset, 0, s.used_q);
  if constexpr (C::kLocal) {  // 64-bit: an unlimited side is 2^31 - 1
    const long long first = static_cast<long long>(j) - s.offset - p.window_right;
    const long long last = static_cast<long long>(j) - s.offset + p.window_left + 1;
    rows.first = first < 0 ? 0 : first > s.used_q ? s.used_q : static_cast<int>(first);
    rows.last = last < 0 ? 0 : last > s.used_q ? s.used_q : static_cast<int>(last);
  }
  return rows;
}

// Whether row i may see key j < used_k by causal and window alone.
template <class C>
__device__ inline bool in_window(const ForwardParams& p, Sequence s, int i, int j) {
  bool visible = true;
  if constexpr (C::kCausal) visible = j <= i + s.offset;
  if constexpr (C::kLocal) {
    const int distance = i + s.offset - j;
    visible = distance <= p.window_left && -distance <= p.window_right;
  }
  return visible;
}

}  // namespace cupyflash
