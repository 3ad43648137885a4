// score.cuh: from q.k to the score that the softmax sees: scale, softcap, ALiBi, bias, in this order, and the bool mask.
//
// The one place where a score is changed: whatever joins later (functions of the user) joins here, for every kernel.
#pragma once

#include "seqlen.cuh"
#include "types.cuh"

namespace cupyflash {

// What the score step reads for one (batch, query head), found once.
template <class C>
struct ScoreContext {
  float slope;
  const typename C::Bias* bias;  // (Sq, Sk)
  const unsigned char* mask;     // (Sq, Sk)
};

template <class C>
__device__ inline ScoreContext<C> score_context(const ForwardParams& p, int b, int h) {
  ScoreContext<C> context{};
  if constexpr (C::kPacked) b = clamp(b, 0, p.batch - 1);  // what lies between sequences has no score
  if constexpr (C::kAlibi) context.slope = p.alibi_slopes[b * p.alibi_stride_batch + h * p.alibi_stride_head];
  if constexpr (C::kBias) {
    context.bias = static_cast<const typename C::Bias*>(p.bias) + b * p.bias_stride_batch + h * p.bias_stride_head;
  }
  if constexpr (C::kMask) context.mask = p.mask + b * p.mask_stride_batch + h * p.mask_stride_head;
  return context;
}

// tanh to float32's accuracy from exp2: tanh.approx has 11 bits, and a cap of 50 would turn that into 0.02 of a logit.
__device__ inline float tanh_of(float x) {
  const float e = exp2f(fabsf(x) * 2.8853900817779268f);  // 2 log2(e)
  return copysignf(1.0f - 2.0f / (e + 1.0f), x);
}
__device__ inline double tanh_of(double x) { return tanh(x); }

// The score in natural units. i < Sq and j < Sk.
template <class C, class Acc>
__device__ inline Acc score_step(const ForwardParams& p, const ScoreContext<C>& context, Sequence s, Acc qk, int i, int j) {
  Acc score = qk * static_cast<Acc>(p.softmax_scale);
  if constexpr (C::kSoftcap) {
    const Acc cap = static_cast<Acc>(p.softcap);
    score = cap * tanh_of(score / cap);
  }
  if constexpr (C::kAlibi) score -= static_cast<Acc>(context.slope) * static_cast<Acc>(abs(i + s.offset - j));
  if constexpr (C::kBias) score += static_cast<Acc>(widen(context.bias[i * p.bias_stride_q + j * p.bias_stride_k]));
  return score;
}

// The derivative of the score by the scaled product: what the softcap does to it.
template <class C, class Acc>
__device__ inline Acc score_slope(const ForwardParams& p, Acc qk) {
  if constexpr (!C::kSoftcap) return 1;
  const Acc tanh = tanh_of(qk * static_cast<Acc>(p.softmax_scale) / static_cast<Acc>(p.softcap));
  return 1 - tanh * tanh;
}

// Whether the bool mask, if any, lets row i see key j. i < Sq and j < Sk.
template <class C>
__device__ inline bool is_let_through(const ForwardParams& p, const ScoreContext<C>& context, int i, int j) {
  if constexpr (!C::kMask) return true;
  return context.mask[i * p.mask_stride_q + j * p.mask_stride_k] != 0;
}

// Whether row i sees key j < used_k.
template <class C>
__device__ inline bool is_visible(const ForwardParams& p, const ScoreContext<C>& context, Sequence s, int i, int j) {
  return in_window<C>(p, s, i, j) && is_let_through(p, context, i, j);
}

}  // namespace cupyflash
