// softmax.cuh: what the tiled kernels do between their two products: which keys a block of rows meets, the online softmax on the
// accumulators of S, and the end of a row. A warp owns kTiles x 16 rows in the accumulator layout of mma.sync and wgmma alike:
// [16-row tile][8-column tile][4], where element e of lane l is row l / 4 + (e >= 2 ? 8 : 0), column 2 (l % 4) + e % 2.
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
[[maybe_unused]] constexpr float kGrowth = 8.0f;  // latent_merge.cu has no use for it

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
// state.rescale: at once where O is at hand, else later. kExact: a reference is the row maximum. kLeavesOut: columns past those that any
// row of the warp sees are left out, 32 at a time. It must not be while products are under way.
template <class C, bool kMasked, int kTiles, bool kExact = false, bool kLeavesOut = false, class Grow>
__device__ inline void softmax_step(const ForwardParams& p, const Work<C>& w, int j, float (&rS)[kTiles][C::kBlockN / 8][4],
                                    RowState<kTiles>& state, int warp_row, Grow grow) {
  const int lane = threadIdx.x % 32;
  const float scale_log2 = kFused<C> ? fabsf(p.softmax_scale_log2) : 1.0f;
  constexpr int kStep = kLeavesOut ? 4 : C::kBlockN / 8;
  int columns = C::kBlockN;
  if constexpr (kLeavesOut) columns = visible_keys<C>(p, w.s, w.row + warp_row, w.row + warp_row + 16).last - j * C::kBlockN;
  float block_max[kTiles][2];
  bool grows = false;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.row + warp_row + 16 * m + 8 * r + lane / 4, first_key = j * C::kBlockN + 2 * (lane % 4);
      KeyRange seen{0, w.s.used_k};  // of this row, without a mask
      if constexpr (kMasked) seen = visible_keys<C>(p, w.s, i, i + 1);
      if ((C::kBias || C::kMask) && !is_among(i, w.s.used_q)) seen.last = 0;  // they have no such row
      seen.first -= first_key;
      seen.last -= first_key;
      float top = -infinity(0.0f);
#pragma unroll
      for (int first = 0; first < C::kBlockN / 8; first += kStep) {
        if (kLeavesOut && 8 * first >= columns) continue;
#pragma unroll
        for (int n = first; n < first + kStep && n < C::kBlockN / 8; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            const int column = 8 * n + e % 2, key = first_key + column;
            bool visible = true;
            if constexpr (kMasked || C::kBias || C::kMask) visible = column < seen.last && (!C::kLocal || column >= seen.first);
            if constexpr (C::kMask) visible = visible && is_let_through(p, w.context, i, key);
            if constexpr (!kFused<C>) {
              if (visible) rS[m][n][e] = score_step<C>(p, w.context, w.s, rS[m][n][e], i, key) * static_cast<float>(kLog2E);
            }
            if constexpr (kMasked || C::kMask) {
              if (!visible) rS[m][n][e] = -infinity(0.0f);
            }
            top = fmaxf(top, rS[m][n][e]);
          }
        }
      }
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1));  // the four lanes of a row
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2)) * scale_log2;
      block_max[m][r] = top;
      grows = grows || top > state.reference[m][r] + (kExact ? 0.0f : kGrowth);
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
    float reference[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = (kMasked || C::kMask) && state.reference[m][r] == -infinity(0.0f) ? 0.0f : state.reference[m][r];
    }
#pragma unroll
    for (int first = 0; first < C::kBlockN / 8; first += kStep) {
      if (kLeavesOut && 8 * first >= columns) {
#pragma unroll
        for (int n = first; n < first + kStep && n < C::kBlockN / 8; ++n) rS[m][n][0] = rS[m][n][1] = rS[m][n][2] = rS[m][n][3] = 0;
        continue;
      }
      if constexpr (kLeavesOut) stay_branch();
#pragma unroll
      for (int n = first; n < first + kStep && n < C::kBlockN / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rS[m][n][e] = ex2(fmaf(rS[m][n][e], scale_log2, -reference[e / 2]));
          state.sum[m][e / 2] += rS[m][n][e];
        }
      }
    }
  }
}

// `seen` stays 0 until a pair holds an infinity or a NaN.
__device__ inline void watch(Pair<Half> pair, unsigned& seen) { seen = fma_pair(*reinterpret_cast<unsigned*>(&pair), 0, seen, Half{}); }
__device__ inline void watch(Pair<BFloat16> pair, unsigned& seen) {
  seen = fma_pair(*reinterpret_cast<unsigned*>(&pair), 0, seen, BFloat16{});
}
__device__ inline void watch(Pair<float> pair, unsigned& seen) { seen |= __float_as_uint(pair.low * 0.0f + pair.high * 0.0f) & 0x7fffffff; }

// Writes a pair of a row of O, as far as its columns exist.
template <class C>
__device__ inline void store_pair(const ForwardParams& p, const Work<C>& w, int i, int column, Pair<typename C::Out> pair) {
  using Out = typename C::Out;
  if (!is_among(i, rows_of<C>(p, w.s))) return;
  Out* target =
      static_cast<Out*>(p.out) + w.b * p.out_stride_batch + w.h * p.out_stride_head + (rows_before<C>(w.s) + i) * p.out_stride_seq + column;
  store_pair<C::kUnaligned>(target, column, p.head_dim_v, pair);
}

// Divides by the row sums, gives O to `store` (row of the warp, column, pair), eight rows at a time, after which it calls `next_rows`, and
// writes LSE; returns which rows of the warp attend_row must compute again, bit 16 m + 8 r + l / 4.
template <class C, int kTiles, class Store, class NextRows>
__device__ inline unsigned finish(const ForwardParams& p, const Work<C>& w, float (&rO)[kTiles][C::kHeadDimV / 8][4],
                                  const RowState<kTiles>& state, int warp_row, Store store, NextRows next_rows) {
  const int lane = static_cast<int>(opaque(threadIdx.x) % 32);  // not to be kept through the loop before
  unsigned again = 0;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.row + warp_row + 16 * m + 8 * r + lane / 4;
      float sum = state.sum[m][r];
      sum += __shfl_xor_sync(kWarp, sum, 1);
      sum += __shfl_xor_sync(kWarp, sum, 2);
      const bool used = is_among(i, w.s.used_q);
      const bool empty = state.reference[m][r] == -infinity(0.0f);
      const bool live = used && !empty;
      const float scale = rcp(sum);
      unsigned not_finite = 0;
      auto write = [&](auto all_live) {
#pragma unroll
        for (int n = 0; n < C::kHeadDimV / 8; ++n) {
          float low = rO[m][n][2 * r] * scale, high = rO[m][n][2 * r + 1] * scale;
          if constexpr (!decltype(all_live)::value) {
            if (!live) {
              not_finite |= __float_as_uint(rO[m][n][2 * r] * 0.0f + rO[m][n][2 * r + 1] * 0.0f) & 0x7fffffff;
              low = high = 0;
            }
          }
          const Pair<typename C::Out> pair = narrow_pair<typename C::Out>(low, high);
          watch(pair, not_finite);
          store(16 * m + 8 * r + lane / 4, 8 * n + 2 * (lane % 4), pair);
        }
      };
      if (__all_sync(kWarp, live)) {
        write(Constant<true>{});
      } else {
        write(Constant<false>{});
      }
      next_rows(2 * m + r);
      if constexpr (C::kWriteLse) {
        const float lse = live ? (state.reference[m][r] + log2f(sum)) * static_cast<float>(1 / kLog2E) : -infinity(0.0f);
        if (lane % 4 == 0 && is_among(i, rows_of<C>(p, w.s))) static_cast<float*>(p.lse)[first_in_vector<C>(p, w.s, w.b, w.h) + i] = lse;
      }
      const bool finite = (not_finite & 0x7fff7fff) == 0;  // without the signs of zeros
      const bool in_range = finite && sum > 0.0f && sum < infinity(0.0f) && fabsf(state.reference[m][r]) <= kLargestReference;
      const unsigned bad = __ballot_sync(kWarp, used && !in_range && !(empty && finite && sum == 0.0f));
      if (bad != 0) {
#pragma unroll
        for (int row = 0; row < 8; ++row) again |= (bad >> (4 * row) & 0xf) ? 1u << (16 * m + 8 * r + row) : 0u;
      }
    }
  }
  return again;
}

}  // namespace cupyflash
