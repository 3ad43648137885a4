// softmax.cuh: what the tiled kernels of the forward do between their two products, the online softmax on the accumulators of S, and the
// end of a row. A warp owns kTiles x 16 rows in the accumulator layout of mma.sync and wgmma alike: [16-row tile][8-column tile][4], where
// element e of lane l is row l / 4 + (e >= 2 ? 8 : 0), column 2 (l % 4) + e % 2.
#pragma once

#include "work.cuh"

namespace cupyflash {

// The softmax state of a warp's rows: lane l owns rows l / 4 and l / 4 + 8 of each 16-row tile.
template <int kTiles>
struct RowState {
  float reference[kTiles][2];  // P = exp2(score - reference), all in log2 units; -inf: no key yet
  float sum[kTiles][2];        // of this lane's columns
  float rescale[kTiles][2];    // what O has to be multiplied by
};

// A reference moves only when a score passes it by this much: P stays below 2^8, far from fp16's 2^16, and O is hardly ever rescaled
// (the lazy rescale of FlashAttention-4). At D = 128 and 64 keys a block the rescale costs two multiplications an element of S.
constexpr float kGrowth = 8.0f;

// O = O * rescale for the rows of a warp that outgrew their reference.
template <class C, int kTiles>
__device__ inline void rescale_output(float (&rO)[kTiles][C::kHeadDimV / 8][4], const RowState<kTiles>& state) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rO[m][n][e] *= state.rescale[m][e / 2];
    }
  }
}

// S, as the product leaves it, becomes P in place; where a row outgrew its reference, that moves, and `grow` is to scale O by
// state.rescale: at once where O is at hand, else later.
template <class C, bool kMasked, int kTiles, class Grow>
__device__ inline void softmax_step(const ForwardParams& p, const Work<C>& w, int j, float (&rS)[kTiles][C::kBlockN / 8][4],
                                    RowState<kTiles>& state, int warp_row, Grow grow) {
  const int lane = threadIdx.x % 32;
  const float scale_log2 = kFused<C> ? fabsf(p.softmax_scale_log2) : 1.0f;
  float block_max[kTiles][2];
  bool grows = false;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.row + warp_row + 16 * m + 8 * r + lane / 4;
      float top = -infinity(0.0f);
#pragma unroll
      for (int n = 0; n < C::kBlockN / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          const int key = j * C::kBlockN + 8 * n + 2 * (lane % 4) + e % 2;
          score_of<C, kMasked>(p, w.context, w.s, rS[m][n][e], i, key);
          top = fmaxf(top, rS[m][n][e]);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1));  // the four lanes of a row
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2)) * scale_log2;
      block_max[m][r] = top;
      grows = grows || top > state.reference[m][r] + kGrowth;
    }
  }
  if (__any_sync(kWarp, grows)) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float old = state.reference[m][r];
        const float reference = fmaxf(old, block_max[m][r]);
        const float rescale = old == reference ? 1.0f : ex2(old - reference);  // also where both are -inf
        state.reference[m][r] = reference;
        state.rescale[m][r] = rescale;
        state.sum[m][r] *= rescale;
      }
    }
    grow();
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float reference = (kMasked || C::kMask) && state.reference[m][r] == -infinity(0.0f) ? 0.0f : state.reference[m][r];
      float sum = state.sum[m][r];
#pragma unroll
      for (int n = 0; n < C::kBlockN / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          rS[m][n][e] = ex2(fmaf(rS[m][n][e], scale_log2, -reference));
          sum += rS[m][n][e];
        }
      }
      state.sum[m][r] = sum;
    }
  }
}

// Writes two neighbouring elements of a row of O, where they exist.
template <class C>
__device__ inline void store_pair(const ForwardParams& p, const Work<C>& w, int i, int column, float low, float high) {
  using Out = typename C::Out;
  if (i >= p.seqlen_q) return;
  Out* target = static_cast<Out*>(p.out) + w.b * p.out_stride_batch + w.h * p.out_stride_head + i * p.out_stride_seq + column;
  store_pair<C::kUnaligned>(target, column, p.head_dim_v, low, high);
}

// Divides by the row sums, gives O to `store` (row of the warp, column, two elements) and writes LSE; returns which rows of the warp
// attend_row must compute again, bit 16 m + 8 r + l / 4.
template <class C, int kTiles, class Store>
__device__ inline unsigned finish(const ForwardParams& p, const Work<C>& w, const float (&rO)[kTiles][C::kHeadDimV / 8][4],
                                  const RowState<kTiles>& state, int warp_row, Store store) {
  const int lane = opaque(threadIdx.x) % 32;  // not to be kept through the loop before
  unsigned again = 0;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.row + warp_row + 16 * m + 8 * r + lane / 4;
      float sum = state.sum[m][r];
      sum += __shfl_xor_sync(kWarp, sum, 1);
      sum += __shfl_xor_sync(kWarp, sum, 2);
      const bool used = i < w.s.used_q;
      const bool empty = state.reference[m][r] == -infinity(0.0f);
      const bool live = used && !empty;
      const float scale = 1.0f / sum;
      float total = 0;  // NaN if an element of O is not finite
#pragma unroll
      for (int n = 0; n < C::kHeadDimV / 8; ++n) {
        const int column = 8 * n + 2 * (lane % 4);
        const float low = rO[m][n][2 * r], high = rO[m][n][2 * r + 1];
        total += low * 0.0f + high * 0.0f;
        store(16 * m + 8 * r + lane / 4, column, live ? low * scale : 0.0f, live ? high * scale : 0.0f);
      }
      if constexpr (C::kWriteLse) {
        const float lse = live ? (state.reference[m][r] + log2f(sum)) * static_cast<float>(1 / kLog2E) : -infinity(0.0f);
        if (lane % 4 == 0 && i < p.seqlen_q) {
          static_cast<float*>(p.lse)[(static_cast<long long>(w.b) * p.num_heads_q + w.h) * p.seqlen_q + i] = lse;
        }
      }
      const bool in_range = total == 0.0f && sum > 0.0f && sum < infinity(0.0f) && fabsf(state.reference[m][r]) <= kLargestReference;
      unsigned bad = __ballot_sync(kWarp, used && !in_range && !(empty && total == 0.0f && sum == 0.0f));
#pragma unroll
      for (int row = 0; row < 8; ++row) again |= (bad >> (4 * row) & 0xf) ? 1u << (16 * m + 8 * r + row) : 0u;
    }
  }
  return again;
}

}  // namespace cupyflash
