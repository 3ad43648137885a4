// row_gradient.cuh: one warp computes dQ of one query row, or dK and dV of one key, from the definition.
//
// Most of bwd_simple, and the way out of the tiled kernels: a gradient that left their range (an infinity, a NaN) is computed again here,
// where a pair that is not visible is skipped before its key or row is multiplied.
#pragma once

#include "row.cuh"

namespace cupyflash {

// One head's arrays and what all of its pairs share.
template <class C>
struct Head {
  using Element = typename C::Element;
  using Acc = typename AccumulatorOf<Element>::Type;
  static constexpr int kPerLane = (C::kHeadDim + 31) / 32;    // elements of q and k that a lane holds: d = lane + 32 n
  static constexpr int kPerLaneV = (C::kHeadDimV + 31) / 32;  // the same of v and dO
  const BackwardParams& p;
  SequenceOf<C> s;
  ScoreContext<C> context;
  const Element* gQ;           // (Sq, D)
  const Element* gK;           // (Sk, D)
  const Element* gV;           // (Sk, Dv)
  const typename C::Out* gdO;  // (Sq, Dv), any strides
  const Acc* gLse;             // (Sq)
  const Acc* gDelta;           // (Sq)

  __device__ Head(const BackwardParams& params, int b, int h) : p(params) {
    const ForwardParams& f = p.forward;
    const int h_kv = h / (f.num_heads_q / f.num_heads_kv);
    s = sequence_of<C>(f, b);
    context = score_context<C>(f, b, h);
    const long long first_row = rows_before<C>(s), first_key = keys_before<C>(s);
    gQ = static_cast<const Element*>(f.q) + b * f.q_stride_batch + h * f.q_stride_head + first_row * f.q_stride_seq;
    gK = static_cast<const Element*>(f.k) + b * f.k_stride_batch + h_kv * f.k_stride_head + first_key * f.k_stride_seq;
    gV = static_cast<const Element*>(f.v) + b * f.v_stride_batch + h_kv * f.v_stride_head + first_key * f.v_stride_seq;
    gdO = static_cast<const typename C::Out*>(p.dout) + b * p.dout_stride_batch + h * p.dout_stride_head + first_row * p.dout_stride_seq;
    const long long row = first_in_vector<C>(f, s, b, h);
    gLse = static_cast<const Acc*>(p.row_lse) + row;
    gDelta = static_cast<const Acc*>(p.row_delta) + row;
  }

  __device__ void load_q(int i, Acc (&r)[kPerLane]) const { load(gQ + i * p.forward.q_stride_seq, 1, p.forward.head_dim, r); }
  __device__ void load_k(int j, Acc (&r)[kPerLane]) const { load(gK + j * p.forward.k_stride_seq, 1, p.forward.head_dim, r); }
  __device__ void load_v(int j, Acc (&r)[kPerLaneV]) const { load(gV + j * p.forward.v_stride_seq, 1, p.forward.head_dim_v, r); }
  __device__ void load_dout(int i, Acc (&r)[kPerLaneV]) const {
    load(gdO + i * p.dout_stride_seq, p.dout_stride_dim, p.forward.head_dim_v, r);
  }

  // Whether the pair exists: i < used_q and j < used_k hold already.
  __device__ bool sees(int i, int j) const { return is_visible<C>(p.forward, context, s, i, j) && gLse[i] != infinity(Acc()); }
  // Whether all that row i gives is NaN or infinite by definition, whichever keys it sees.
  __device__ bool is_lost(int i) const { return gLse[i] != gLse[i] || !(abs_of(gDelta[i]) < infinity(Acc())); }

 private:
  template <class T, int kCount>
  __device__ static void load(const T* g, long long stride, int width, Acc (&r)[kCount]) {
    for (int n = 0; n < kCount; ++n) {
      const int d = threadIdx.x % 32 + 32 * n;
      r[n] = d < width ? static_cast<Acc>(widen(g[d * stride])) : Acc(0);
    }
  }
};

// Row i and key j: the weight, the gradient of the score, and that of q . k.
template <class Acc>
struct ScorePair {
  Acc weight, d_score, d_product;
};

// Scope: one whole warp, each lane with its elements of the row and the key; all lanes get the pair.
template <class C, class H = Head<C>>
__device__ inline ScorePair<typename H::Acc> pair_of(const H& head, int i, int j, const typename H::Acc (&rQ)[H::kPerLane],
                                                     const typename H::Acc (&rK)[H::kPerLane], const typename H::Acc (&rdO)[H::kPerLaneV],
                                                     const typename H::Acc (&rV)[H::kPerLaneV]) {
  using Acc = typename H::Acc;
  const ForwardParams& f = head.p.forward;
  Acc product = 0, d_weight = 0;  // S before the scale, dP
  for (int n = 0; n < H::kPerLane; ++n) product += rQ[n] * rK[n];
  for (int n = 0; n < H::kPerLaneV; ++n) d_weight += rdO[n] * rV[n];
  product = warp_sum(product);
  d_weight = warp_sum(d_weight);
  ScorePair<Acc> pair;
  pair.weight = exp_of(score_step<C>(f, head.context, head.s, product, i, j) - head.gLse[i]);
  pair.d_score = pair.weight * (d_weight - head.gDelta[i]);
  pair.d_product = pair.d_score * score_slope<C>(f, product) * static_cast<Acc>(f.softmax_scale);
  return pair;
}

template <class T, class Acc, int kCount>
__device__ inline void store(T* g, int width, const Acc (&r)[kCount]) {
  for (int n = 0; n < kCount; ++n) {
    const int d = threadIdx.x % 32 + 32 * n;
    if (d < width) narrow(r[n], g[d]);
  }
}

// dQ of row i of batch (packed: sequence) b, and its part of the gradient of the slope.
template <class C>
__device__ void row_gradient(const BackwardParams& p, int b, int h, int i) {
  using H = Head<C>;
  using Acc = typename H::Acc;
  const ForwardParams& f = p.forward;
  const H head(p, b, h);
  Acc rQ[H::kPerLane], rK[H::kPerLane], rdQ[H::kPerLane] = {};
  Acc rdO[H::kPerLaneV], rV[H::kPerLaneV];
  Acc slope = 0;
  if (i < head.s.used_q) {
    head.load_q(i, rQ);
    head.load_dout(i, rdO);
    const KeyRange keys = visible_keys<C>(f, head.s, i, i + 1);
    for (int j = keys.first; j < keys.last; ++j) {
      if (!head.sees(i, j)) continue;
      head.load_k(j, rK);
      head.load_v(j, rV);
      const ScorePair<Acc> pair = pair_of<C>(head, i, j, rQ, rK, rdO, rV);
      for (int n = 0; n < H::kPerLane; ++n) rdQ[n] += pair.d_product * rK[n];
      slope += pair.d_score * static_cast<Acc>(abs(i + head.s.offset - j));
    }
  }
  using Element = typename C::Element;
  if (p.dq) {
    const long long row = rows_before<C>(head.s) + i;
    store(static_cast<Element*>(p.dq) + b * p.dq_stride_batch + row * p.dq_stride_seq + h * p.dq_stride_head, f.head_dim, rdQ);
  }
  if constexpr (C::kAlibi) {
    if (p.dalibi_slopes && threadIdx.x % 32 == 0) {
      static_cast<Acc*>(p.row_slope)[first_in_vector<C>(f, head.s, b, h) + i] = slope;
    }
  }
}

// dK and dV of key j, summed over the query heads that read it.
template <class C>
__device__ void key_gradient(const BackwardParams& p, int b, int h_kv, int j) {
  using H = Head<C>;
  using Acc = typename H::Acc;
  const ForwardParams& f = p.forward;
  const int group = f.num_heads_q / f.num_heads_kv;
  Acc rQ[H::kPerLane], rK[H::kPerLane], rdK[H::kPerLane] = {};
  Acc rdO[H::kPerLaneV], rV[H::kPerLaneV], rdV[H::kPerLaneV] = {};
  for (int h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    const H head(p, b, h);
    if (j >= head.s.used_k) break;
    head.load_k(j, rK);
    head.load_v(j, rV);
    const RowRange rows = visible_rows<C>(f, head.s, j, j + 1);
    for (int i = rows.first; i < rows.last; ++i) {
      if (!head.sees(i, j)) continue;
      head.load_q(i, rQ);
      head.load_dout(i, rdO);
      const ScorePair<Acc> pair = pair_of<C>(head, i, j, rQ, rK, rdO, rV);
      for (int n = 0; n < H::kPerLane; ++n) rdK[n] += pair.d_product * rQ[n];
      for (int n = 0; n < H::kPerLaneV; ++n) rdV[n] += pair.weight * rdO[n];
    }
  }
  using Element = typename C::Element;
  const long long key = keys_before<C>(sequence_of<C>(f, b)) + j;
  if (p.dk) store(static_cast<Element*>(p.dk) + b * p.dk_stride_batch + key * p.dk_stride_seq + h_kv * p.dk_stride_head, f.head_dim, rdK);
  if (p.dv) store(static_cast<Element*>(p.dv) + b * p.dv_stride_batch + key * p.dv_stride_seq + h_kv * p.dv_stride_head, f.head_dim_v, rdV);
}

// Whether key j has a gradient that is NaN or infinite by definition: then none has to be computed to know it. Scope: one whole warp.
template <class C>
__device__ inline bool key_is_lost(const BackwardParams& p, int b, int h_kv, int j) {
  const int group = p.forward.num_heads_q / p.forward.num_heads_kv;
  bool lost = false;
  for (int h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    const Head<C> head(p, b, h);
    if (j >= head.s.used_k) break;
    const RowRange rows = visible_rows<C>(p.forward, head.s, j, j + 1);
    for (int i = rows.first + threadIdx.x % 32; i < rows.last; i += 32) lost = lost || (head.is_lost(i) && head.sees(i, j));
  }
  return __any_sync(kWarp, lost);
}

}  // namespace cupyflash
