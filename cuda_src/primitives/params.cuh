// params.cuh: the one argument of each kernel, filled by cupyflash/params.py (same fields, same order; a unit test compares them).
//
// Eight-byte fields come first, so there is no padding. Strides count elements and are 64-bit: one tensor may hold more than 2^31
// elements, or be a view into one that does. A pointer that is not used is null; a broadcast axis has stride 0.
#pragma once

namespace cupyflash {

struct ForwardParams {
  // Q (B, Sq, Hq, D), K (B, Sk, Hkv, D), V (B, Sk, Hkv, Dv), O (B, Sq, Hq, Dv): last axis dense. LSE (B, Hq, Sq), compact.
  const void* q;
  const void* k;
  const void* v;
  void* out;
  const void* bias;           // (B, Hq, Sq, Sk)
  const unsigned char* mask;  // (B, Hq, Sq, Sk), non-zero where a query may attend
  const float* alibi_slopes;  // (B, Hq)
  const void* sink;           // (Hq)
  const int* seqused_q;       // (B)
  const int* seqused_k;       // (B)
  void* lse;

  long long q_stride_batch, q_stride_seq, q_stride_head;
  long long k_stride_batch, k_stride_seq, k_stride_head;
  long long v_stride_batch, v_stride_seq, v_stride_head;
  long long out_stride_batch, out_stride_seq, out_stride_head;
  long long bias_stride_batch, bias_stride_head, bias_stride_q, bias_stride_k;
  long long mask_stride_batch, mask_stride_head, mask_stride_q, mask_stride_k;
  long long alibi_stride_batch, alibi_stride_head;
  long long sink_stride, seqused_q_stride, seqused_k_stride;

  double softmax_scale;
  double softcap;  // 0: none

  int batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv;
  int head_dim, head_dim_v;       // the true ones; tiles may be wider
  int window_left, window_right;  // distances from the diagonal, 2^31 - 1: unlimited
  int top_left;                   // the diagonal is j = i, else j = i + used_k - used_q
  float softmax_scale_log2, softcap_log2;
};

}  // namespace cupyflash
