// seqlen.cuh: the lengths of one sequence, where its rows begin in packed arrays, and which keys a query row may see.
//
// The diagonal of causal, windows and ALiBi is j = i + offset, with offset = used_k - used_q, or for the top-left corner the first key, 0.
#pragma once

#include "params.cuh"
#include "types.cuh"

namespace cupyflash {

// n / d, 0 <= n < 2^31, by what params.py has found for d: 3 instructions, where a division takes 25.
__device__ inline int quotient(int n, unsigned multiplier, int shift) {
  return static_cast<int>((__umulhi(static_cast<unsigned>(n), multiplier) + static_cast<unsigned>(n)) >> shift);
}

struct Sequence {
  int used_q, used_k, offset;
};
struct PackedSequence : Sequence {
  int first_q, first_k, len_q, len_k;  // where it begins in Q and K, and how many rows and keys it has
};
template <class C>
using SequenceOf = typename Choice<C::kPacked, PackedSequence, Sequence>::Type;

// The first slot of a sequence that is its own.
template <class C>
__device__ inline int first_slot(const ForwardParams& p, int b) {
  if constexpr (C::kPaged) {
    if (p.first_k) return clamp(p.first_k[b * p.first_k_stride], 0, p.seqlen_k);
  }
  return 0;
}

// Packed, numbers -1 and B are what lies before the first sequence and behind the last: rows and keys that nobody uses, and whose results
// are zeros.
template <class C>
__device__ inline SequenceOf<C> sequence_of(const ForwardParams& p, int b) {
  SequenceOf<C> s;
  bool is_sequence = true;
  if constexpr (C::kPacked) {
    auto begin = [&](const int* offsets, long long stride, int n, int total) {
      return n < 0 ? 0 : n > p.batch ? total : clamp(offsets[n * stride], 0, total);
    };
    s.first_q = begin(p.cu_seqlens_q, p.cu_seqlens_q_stride, b, p.seqlen_q);
    s.first_k = C::kPaged ? 0 : begin(p.cu_seqlens_k, p.cu_seqlens_k_stride, b, p.seqlen_k);
    s.len_q = max(begin(p.cu_seqlens_q, p.cu_seqlens_q_stride, b + 1, p.seqlen_q) - s.first_q, 0);
    s.len_k = C::kPaged ? p.seqlen_k : max(begin(p.cu_seqlens_k, p.cu_seqlens_k_stride, b + 1, p.seqlen_k) - s.first_k, 0);
    is_sequence = b >= 0 && b < p.batch;
    s.used_q = is_sequence ? s.len_q : 0;
    s.used_k = is_sequence ? s.len_k : 0;
    if (C::kUsed && is_sequence) {
      if (p.seqused_q) s.used_q = clamp(p.seqused_q[b * p.seqused_q_stride], 0, s.len_q);
      if (p.seqused_k) s.used_k = clamp(p.seqused_k[b * p.seqused_k_stride], 0, s.len_k);
    }
  } else {
    s.used_q = p.seqlen_q;
    s.used_k = p.seqlen_k;
    if constexpr (C::kUsed) {
      if (p.seqused_q) s.used_q = clamp(p.seqused_q[b * p.seqused_q_stride], 0, p.seqlen_q);
      if (p.seqused_k) s.used_k = clamp(p.seqused_k[b * p.seqused_k_stride], 0, p.seqlen_k);
    }
  }
  s.offset = !p.top_left ? s.used_k - s.used_q : is_sequence ? first_slot<C>(p, b) : 0;
  return s;
}

// 0 <= i < count, by one comparison.
__device__ inline bool is_among(int i, int count) { return static_cast<unsigned>(i) < static_cast<unsigned>(count); }

// How many rows and keys a sequence has, used or not, and before which row or key of the array its first one lies.
template <class C>
__device__ inline int rows_of(const ForwardParams& p, const SequenceOf<C>& s) {
  if constexpr (C::kPacked) return s.len_q;
  return p.seqlen_q;
}
template <class C>
__device__ inline int keys_of(const ForwardParams& p, const SequenceOf<C>& s) {
  if constexpr (C::kPacked) return s.len_k;
  return p.seqlen_k;
}
template <class C>
__device__ inline long long rows_before(const SequenceOf<C>& s) {
  if constexpr (C::kPacked) return s.first_q;
  return 0;
}
template <class C>
__device__ inline long long keys_before(const SequenceOf<C>& s) {
  if constexpr (C::kPacked) return s.first_k;
  return 0;
}
// Where the sequence's first row is in compact arrays of one number a row: (B, Hq, Sq), packed (Hq, Tq).
template <class C>
__device__ inline long long first_in_vector(const ForwardParams& p, const SequenceOf<C>& s, int b, int h) {
  return ((C::kPacked ? 0ll : static_cast<long long>(b)) * p.num_heads_q + h) * p.seqlen_q + rows_before<C>(s);
}

// The page of slot j of a sequence, as the table has it: there may be none of that number.
__device__ inline int page_of(const ForwardParams& p, int b, int j) {
  return p.page_table ? p.page_table[b * p.page_table_stride + quotient(j, p.page_multiplier, p.page_shift)] : b;
}
// Which slot of its page it is.
__device__ inline int slot_in_page(const ForwardParams& p, int j) { return j - quotient(j, p.page_multiplier, p.page_shift) * p.page_size; }

// Where the row of a key begins in K or V, of page or batch and sequence strides; entries of the table that are no page are those next to
// it.
template <class C>
__device__ inline long long key_offset(const ForwardParams& p, const SequenceOf<C>& s, int b, int j, long long stride_batch,
                                       long long stride_seq) {
  if constexpr (C::kPaged) {
    const int page = clamp(page_of(p, b, j), 0, p.num_pages - 1);
    return page * stride_batch + slot_in_page(p, j) * stride_seq;
  }
  return b * stride_batch + (keys_before<C>(s) + j) * stride_seq;
}
// What the numbers of a head of a quantised cache are multiplied by.
__device__ inline float descale_of(const float* of_heads, float of_all, long long offset) { return of_heads ? of_heads[offset] : of_all; }

// The sequence that a row or key of a packed array belongs to, from -1 to B: the last that begins there or before.
__device__ inline int sequence_at(const int* offsets, long long stride, int batch, int row) {
  int low = -1, high = batch;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (offsets[middle * stride] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Whether a row of a packed array is one that its sequence uses.
template <class C>
__device__ inline bool is_used_row(const ForwardParams& p, int row) {
  const SequenceOf<C> s = sequence_of<C>(p, sequence_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, p.batch, row));
  return row - s.first_q < s.used_q;
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

// The query rows [first, last) of which each may see some key of [key, key_end), with key_end at most used_k, by causal, window and length.
struct RowRange {
  int first, last;
};

template <class C>
__device__ inline RowRange visible_rows(const ForwardParams& p, Sequence s, int key, int key_end) {
  RowRange rows{0, s.used_q};
  if constexpr (C::kCausal) rows.first = clamp(key - s.offset, 0, s.used_q);
  if constexpr (C::kLocal) {  // 64-bit: an unlimited side is 2^31 - 1
    const long long first = static_cast<long long>(key) - s.offset - p.window_right;
    const long long last = static_cast<long long>(key_end) - s.offset + p.window_left;
    rows.first = first < 0 ? 0 : first > s.used_q ? s.used_q : static_cast<int>(first);
    rows.last = last < 0 ? 0 : last > s.used_q ? s.used_q : static_cast<int>(last);
  }
  return rows;
}

// The query rows [first, last) that see all keys of [key, key_end) by causal, window and length.
template <class C>
__device__ inline RowRange rows_of_all(const ForwardParams& p, Sequence s, int key, int key_end) {
  RowRange rows{0, key_end <= s.used_k ? s.used_q : 0};
  if constexpr (C::kCausal) rows.first = clamp(key_end - 1 - s.offset, 0, s.used_q);
  if constexpr (C::kLocal) {
    const long long first = static_cast<long long>(key_end) - 1 - s.offset - p.window_right;
    const long long last = static_cast<long long>(key) - s.offset + p.window_left + 1;
    rows.first = first < 0 ? 0 : first > s.used_q ? s.used_q : static_cast<int>(first);
    if (last < rows.last) rows.last = last < 0 ? 0 : static_cast<int>(last);
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
