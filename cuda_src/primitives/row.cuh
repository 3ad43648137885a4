// row.cuh: one warp computes one query row from the definition, by an online softmax over 32 keys at a time.
//
// The whole of fwd_simple, and the way out of the tiled kernels: a row that left their range (an infinity, a NaN, a sum that vanished) is
// computed again here, where scores are subtracted before they are scaled and a key that the row does not see is never multiplied.
#pragma once

#include "score.cuh"

namespace cupyflash {

inline constexpr unsigned kWarp = 0xffffffffu;
inline constexpr double kLog2E = 1.4426950408889634;

template <class T>
__device__ inline T warp_sum(T x) {
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(kWarp, x, lane);
  return x;
}
// NaN wins, as in the definition: fmax would drop it.
template <class T>
__device__ inline T max_or_nan(T a, T b) {
  return a != a || a > b ? a : b;
}
template <class T>
__device__ inline T warp_max(T x) {
  for (int lane = 16; lane > 0; lane /= 2) x = max_or_nan(x, __shfl_xor_sync(kWarp, x, lane));
  return x;
}

__device__ inline float exp_of(float x) { return exp2f(x * static_cast<float>(kLog2E)); }
__device__ inline double exp_of(double x) { return exp(x); }
__device__ inline float log_of(float x) { return logf(x); }
__device__ inline double log_of(double x) { return log(x); }

// Scope: one whole warp. Row i of head h of batch (packed: sequence) b: writes O (Dv) and, if asked for, its LSE. Its loops are not
// unrolled: as the way out they hardly ever run, and took a quarter of the time in which a tiled kernel compiles.
template <class C>
__device__ void attend_row(const ForwardParams& p, int b, int h, int i) {
  using Element = typename C::Element;
  using Cached = typename C::Cached;  // of K and V
  using Acc = typename AccumulatorOf<Element>::Type;
  constexpr int kPerLane = (C::kHeadDim + 31) / 32;    // elements of q and k that a lane holds: d = lane + 32 n
  constexpr int kPerLaneV = (C::kHeadDimV + 31) / 32;  // the same of v and o
  const int lane = threadIdx.x % 32;
  const int h_kv = h / (p.num_heads_q / p.num_heads_kv);
  const SequenceOf<C> s = sequence_of<C>(p, b);
  const ScoreContext<C> context = score_context<C>(p, b, h);

  const long long row = rows_before<C>(s) + i;
  const Element* gQ = static_cast<const Element*>(p.q) + b * p.q_stride_batch + row * p.q_stride_seq + h * p.q_stride_head;
  const Cached* gK = static_cast<const Cached*>(p.k) + h_kv * p.k_stride_head;
  const Cached* gV = static_cast<const Cached*>(p.v) + h_kv * p.v_stride_head;

  Acc rQ[kPerLane];
  for (int n = 0; n < kPerLane; ++n) rQ[n] = lane + 32 * n < p.head_dim ? widen(gQ[lane + 32 * n]) : Acc(0);
  Acc rO[kPerLaneV] = {};
  Acc row_max = -infinity(Acc());
  Acc row_sum = 0;
  const bool used = i < s.used_q;
  Acc v_descale = 1;
  if constexpr (!kSame<Cached, Element>) {  // the scales of a head are those of its products: q takes K's, and the result V's
    if (used) {
      const Acc k_descale = descale_of(p.k_descale, p.k_descale_of_all, b * p.k_descale_stride_batch + h_kv * p.k_descale_stride_head);
      for (int n = 0; n < kPerLane; ++n) rQ[n] *= k_descale;
      v_descale = descale_of(p.v_descale, p.v_descale_of_all, b * p.v_descale_stride_batch + h_kv * p.v_descale_stride_head);
    }
  }
  if constexpr (C::kSink) {  // one more key, of value zero: the state after having seen it alone
    row_max = static_cast<Acc>(widen(static_cast<const typename C::Sink*>(p.sink)[h * p.sink_stride]));
    row_sum = row_max > -infinity(Acc()) ? 1 : 0;
  }

  KeyRange keys = visible_keys<C>(p, s, i, i + 1);
  if (used) {
    keys.first = max(keys.first, first_slot<C>(p, b));
  } else {
    keys.last = keys.first;
  }
#pragma unroll 1
  for (int first = keys.first; first < keys.last; first += 32) {
    const int count = min(32, keys.last - first);
    Acc score = -infinity(Acc());  // of key first + lane
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const Cached* gK_j = gK + key_offset<C>(p, s, b, first + n, p.k_stride_batch, p.k_stride_seq);
      Acc dot = 0;
      for (int m = 0; m < kPerLane; ++m) {
        if (lane + 32 * m < p.head_dim) dot += rQ[m] * widen(gK_j[lane + 32 * m]);
      }
      dot = warp_sum(dot);
      if (lane == n) score = dot;
    }
    const int j = first + lane;
    const bool visible = lane < count && is_visible<C>(p, context, s, i, j);
    score = visible ? score_step<C>(p, context, s, score, i, j) : -infinity(Acc());

    const Acc new_max = max_or_nan(row_max, warp_max(score));
    const Acc reference = new_max == -infinity(Acc()) ? Acc(0) : new_max;  // no key yet: exp(-inf - 0) = 0
    const Acc weight = exp_of(score - reference);
    const Acc rescale = exp_of(row_max - reference);
    row_sum = row_sum * rescale + warp_sum(weight);
    row_max = new_max;
    for (int m = 0; m < kPerLaneV; ++m) rO[m] *= rescale;
    const unsigned seen = __ballot_sync(kWarp, visible);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const Acc rP = __shfl_sync(kWarp, weight, n);
      if (!(seen >> n & 1)) continue;  // 0 x NaN would be NaN
      const Cached* gV_j = gV + key_offset<C>(p, s, b, first + n, p.v_stride_batch, p.v_stride_seq);
      for (int m = 0; m < kPerLaneV; ++m) {
        if (lane + 32 * m < p.head_dim_v) rO[m] += rP * widen(gV_j[lane + 32 * m]);
      }
    }
  }

  using Out = typename C::Out;
  Out* gO = static_cast<Out*>(p.out) + b * p.out_stride_batch + row * p.out_stride_seq + h * p.out_stride_head;
  const Acc scale = !used ? Acc(0) : row_sum == Acc(0) ? Acc(1) : v_descale / row_sum;
  for (int m = 0; m < kPerLaneV; ++m) {
    if (lane + 32 * m < p.head_dim_v) narrow(used ? rO[m] * scale : Acc(0), gO[lane + 32 * m]);
  }
  if constexpr (C::kWriteLse) {
    const Acc lse = used ? row_max + log_of(row_sum) : -infinity(Acc());
    if (lane == 0) static_cast<Acc*>(p.lse)[first_in_vector<C>(p, s, b, h) + i] = lse;
  }
}

}  // namespace cupyflash
