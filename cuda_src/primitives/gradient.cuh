// gradient.cuh: what the tiled kernels of the backward do around their products: which rows a block of keys meets, P and dS from the
// accumulators of S and dP, and the way of a gradient to memory. Layouts are those of mma.cuh.
//
// Way out: a row or key whose gradient is not finite is computed again from the definition (row_gradient.cuh). What leaves the range of the
// tiles makes it so: a NaN or an infinity that the tensor cores multiplied by 0, dS beyond the range of 16 bits, and rows whose LSE is so
// large that rounding it moves P by more than 2^(1/4): to those bwd_delta gives a NaN. Only what is not finite by definition, as a row is
// whose dO holds a NaN and every key that it sees, stays as it is: a step of training that overflows must not take hours.
#pragma once

#include "mma.cuh"
#include "row_gradient.cuh"
#include "work.cuh"

namespace cupyflash {

// What one block of the kernel works on whose keys stay while the rows pass by.
template <class C>
struct KeyWork {
  int b, h_kv, key;  // key: the first of the block
  SequenceOf<C> s;
  int row_first, row_last;    // row blocks of which some row sees some key
  int full_first, full_last;  // those among them whose rows all see all keys, by length, causal and window

  // `head` counts key heads through all batches.
  __device__ KeyWork(const ForwardParams& p, int head, int key_block) : key(key_block * C::kBlockN) {
    b = head / p.num_heads_kv;
    h_kv = head % p.num_heads_kv;
    s = sequence_of<C>(p, b);
    find_rows(p);
  }
  __device__ KeyWork(const ForwardParams& p, int b, int h_kv, int key_block, const SequenceOf<C>& s)
      : b(b), h_kv(h_kv), key(key_block * C::kBlockN), s(s) {
    find_rows(p);
  }
  // Not the end of a constructor that the other one calls: so sm_90 spills 68 bytes of a kernel at D = 128.
  __device__ void find_rows(const ForwardParams& p) {
    const int key_end = min(key + C::kBlockN, s.used_k);
    RowRange rows = visible_rows<C>(p, s, key, key_end);
    if (key >= s.used_k) rows.last = rows.first;
    row_first = rows.first / C::kBlockM;
    row_last = rows.first < rows.last ? (rows.last + C::kBlockM - 1) / C::kBlockM : row_first;
    rows = rows_of_all<C>(p, s, key, key + C::kBlockN);
    full_first = (rows.first + C::kBlockM - 1) / C::kBlockM;
    full_last = rows.last / C::kBlockM;
  }

  __device__ bool is_full(int i) const { return i >= full_first && i < full_last; }
};

// What a lane must know of its rows: LSE in log2 units, and -delta. A row past the end has P = 1 and dP = 0: it is zeros in dO.
template <int kTiles>
struct RowVectors {
  float reference[kTiles][2];
  float minus_delta[kTiles][2];  // what dP begins with
};

// `reference` and `delta` begin with the warp's first row, of which `count` exist.
template <int kTiles>
__device__ inline void read_vectors(RowVectors<kTiles>& rows, const float* reference, const float* delta, int count = 16 * kTiles) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = 16 * m + 8 * r + threadIdx.x % 32 / 4;
      rows.reference[m][r] = i < count ? reference[i] : 0.0f;
      rows.minus_delta[m][r] = i < count ? -delta[i] : 0.0f;
    }
  }
}

// S becomes P, and dP - delta becomes the gradient of scale q.k, both in place: dS, times the slope of the softcap. `seen` is told of each
// element: (16-row tile, 8-column tile, element, row, key, dS). `row` and `key` are the warp's first.
template <class C, bool kMasked, int kTiles, int kKeys, class Seen>
__device__ inline void gradient_step(const ForwardParams& p, const ScoreContext<C>& context, const Sequence& s, int row, int key,
                                     float (&rS)[kTiles][kKeys / 8][4], float (&rdP)[kTiles][kKeys / 8][4], const RowVectors<kTiles>& rows,
                                     Seen seen) {
  const int lane = threadIdx.x % 32;
  const float scale_log2 = kFused<C> ? p.softmax_scale_log2 : 1.0f;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = row + 16 * m + 8 * (e / 2) + lane / 4;
        const int j = key + 8 * n + 2 * (lane % 4) + e % 2;
        const float product = rS[m][n][e];
        float score = product;
        score_of<C, kMasked>(p, context, s, score, i, j);
        const bool hidden = (kMasked || C::kMask) && score == -infinity(0.0f);
        const float weight = hidden ? 0.0f : ex2(fmaf(score, scale_log2, -rows.reference[m][e / 2]));
        const float d_score = hidden ? 0.0f : weight * rdP[m][n][e];
        seen(m, n, e, i, j, d_score);
        rS[m][n][e] = weight;
        rdP[m][n][e] = C::kSoftcap && !hidden ? d_score * score_slope<C>(p, product) : d_score;
      }
    }
  }
}

// Which rows of a 16-row tile hold an element that is not finite: bit r of the warp's result for row r.
template <int kColumns>
__device__ inline unsigned not_finite(const float (&r)[kColumns][4]) {
  unsigned found = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = 0;  // NaN if there is one
#pragma unroll
    for (int n = 0; n < kColumns; ++n) total += r[n][2 * half] * 0.0f + r[n][2 * half + 1] * 0.0f;
    const unsigned lanes = __ballot_sync(kWarp, total != 0.0f);
#pragma unroll
    for (int row = 0; row < 8; ++row) found |= (lanes >> (4 * row) & 0xf) ? 1u << (8 * half + row) : 0u;
  }
  return found;
}

// Writes the warp's share of a gradient (the columns of Dealt), times `scale`; g is the first of its rows, of which `count` exist.
template <bool kUnaligned, int kWidth, int kWarps, int kTiles, class T>
__device__ inline void store_gradient(T* g, long long stride, int count, int width,
                                      const float (&r)[kTiles][2 * Dealt<kWidth, kWarps>::kCount][4], float scale, int warp) {
  const int lane = opaque(threadIdx.x) % 32;  // not to be kept through the loop before
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 16 * m + 8 * half + lane / 4;
      if (i >= count) continue;
#pragma unroll
      for (int n = 0; n < 2 * Dealt<kWidth, kWarps>::kCount; ++n) {
        const int column = Dealt<kWidth, kWarps>::column(warp, n) + 2 * (lane % 4);
        store_pair<kUnaligned>(g + i * stride + column, column, width,
                               narrow_pair<T>(r[m][n][2 * half] * scale, r[m][n][2 * half + 1] * scale));
      }
    }
  }
}

// Computes those rows of dQ again that left the range of the tiles; the warp has written its rows, from `row` on, as they are.
template <class C, int kTiles>
__device__ inline void repair_rows(const BackwardParams& p, const SequenceOf<C>& s, int b, int h, int row,
                                   const float (&rdQ)[kTiles][C::kHeadDim / 8][4]) {
  __syncwarp();  // what was written of these rows is overwritten by other lanes
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    for (unsigned again = not_finite(rdQ[m]); again; again &= again - 1) {
      const int i = row + 16 * m + __ffs(again) - 1;
      if (i < rows_of<C>(p.forward, s) && !Head<C>(p, b, h).is_lost(i)) row_gradient<C>(p, b, h, i);
    }
  }
}

// Scope: warp. Of each four lanes that have a row together, lane t holds words t of four chunks, and then chunk t.
__device__ inline void transpose_quad(unsigned (&r)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = step == 1 ? 2 * pair : pair, high = low + step;
      const unsigned other = __shfl_xor_sync(kWarp, upper ? r[low] : r[high], step);
      r[low] = upper ? other : r[low];
      r[high] = upper ? r[high] : other;
    }
  }
}

// As store_gradient of all columns of 16 rows, but 16 bytes a lane and so 64 of a row: its pairs fill only half a sector of 32 at a time.
template <int kWidth, class T>
__device__ inline void store_chunks(T* g, long long stride, int count, int width, const float (&r)[kWidth / 8][4], float scale) {
  constexpr int kColumns = kWidth / 8;
  const int lane = opaque(threadIdx.x) % 32;  // not to be kept through the loop before
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 8 * half + lane / 4;
#pragma unroll
    for (int n = 0; n < kColumns; n += 4) {
      unsigned chunk[4] = {};
#pragma unroll
      for (int m = 0; m < 4 && n + m < kColumns; ++m) {
        chunk[m] = pack(r[n + m][2 * half] * scale, r[n + m][2 * half + 1] * scale, T{});
      }
      transpose_quad(chunk);
      const int column = 8 * (n + lane % 4);
      if (i < count && column < width) global_store_16(g + i * stride + column, chunk);
    }
  }
}

// dQ of a warp's rows, from `row` on, goes to memory; rows that left the range of the tiles are computed again.
template <class C, int kTiles>
__device__ inline void finish_rows(const BackwardParams& p, const SequenceOf<C>& s, int b, int h, int row,
                                   const float (&rdQ)[kTiles][C::kHeadDim / 8][4]) {
  const ForwardParams& f = p.forward;
  if (p.dq) {
    auto* g = static_cast<typename C::Element*>(p.dq) + b * p.dq_stride_batch + h * p.dq_stride_head +
              (rows_before<C>(s) + row) * p.dq_stride_seq;
    const float scale = static_cast<float>(f.softmax_scale);
    store_gradient<C::kUnaligned, C::kHeadDim, 1, kTiles>(g, p.dq_stride_seq, rows_of<C>(f, s) - row, f.head_dim, rdQ, scale, 0);
  }
  repair_rows<C, kTiles>(p, s, b, h, row, rdQ);
}

// Sums of dQ over the blocks of keys, in float: of each head tiles of 16 rows x 8 columns, row by row of tiles or, with kPanels, of each 64
// rows those of 64 columns first; in a tile the 128 elements lie as the lanes hold them, so that a warp adds to consecutive memory. A head
// has whole blocks of 64 rows.
template <class C>
struct QuerySums {
  static constexpr int kColumns = C::kHeadDim / 8;
  static constexpr bool kByFour = C::kArch >= 90;  // a lane's four elements are neighbours; else each of them is, over the lanes

  // Of head h of batch b; packed: of a sequence.
  __device__ static float* of_head(const BackwardParams& p, const SequenceOf<C>& s, int b, int h) {
    const long long head = (C::kPacked ? 0ll : static_cast<long long>(b)) * p.forward.num_heads_q + h;
    const int rows = C::kPacked ? static_cast<int>(p.dq_sum_rows) : (p.forward.seqlen_q + 63) / 64 * 64;  // fewer registers
    return p.dq_sum + (head * rows + sum_rows_before<C>(s, b)) * C::kHeadDim;
  }
  // The tile of a head, or without kPanels the one that many tiles below and to the right of the one at g.
  __device__ static float* tile(float* g, int row_tile, int column_tile) {
    if constexpr (C::kPanels) {
      return g + ((static_cast<long long>(row_tile / 4) * (kColumns / 8) + column_tile / 8) * 4 + row_tile % 4) * 1024 +
             column_tile % 8 * 128;
    } else {
      return g + (static_cast<long long>(row_tile) * kColumns + column_tile) * 128;
    }
  }
  // Scope: warp, as for the rest. The lane's elements of such a tile.
  __device__ static float* at(float* g, int row_tile, int column_tile) {
    return tile(g, row_tile, column_tile) + threadIdx.x % 32 * (kByFour ? 4 : 1);
  }
  __device__ static void add(float* g, const float (&r)[4]) {
    if constexpr (kByFour) {
      red_add_4(g, r);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) red_add(g + 32 * e, r[e]);
    }
  }
  __device__ static void read(const float* g, float (&r)[4]) {
    Elements<float, 4> four;
    if constexpr (kByFour) four = *reinterpret_cast<const Elements<float, 4>*>(g);
#pragma unroll
    for (int e = 0; e < 4; ++e) r[e] = kByFour ? four.x[e] : g[32 * e];
  }
};

}  // namespace cupyflash
