// params.cuh: the one argument of each kernel, filled by cupyflash/params.py (same fields, same order; a unit test compares them).
//
// Eight-byte fields come first, so there is no padding. Strides count elements and are 64-bit: one tensor may hold more than 2^31
// elements, or be a view into one that does. A pointer that is not used is null; a broadcast axis has stride 0.
#pragma once

namespace cupyflash {

struct ForwardParams {
  // Q (B, Sq, Hq, D), K (B, Sk, Hkv, D), V (B, Sk, Hkv, Dv), O (B, Sq, Hq, Dv): last axis dense. LSE (B, Hq, Sq), compact.
  // Packed: B sequences one after another in Q (1, Tq, Hq, D) and so on, whose batch stride is 0; LSE (Hq, Tq).
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
  const int* cu_seqlens_q;    // (B + 1), packed: sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
  const int* cu_seqlens_k;    // (B + 1)
  void* lse;
  void* row_tiles;  // TileList: blocks of tile_rows rows of the sequences of a packed call; null where nobody asks
  void* key_tiles;  // of tile_keys keys
  // Paged: K and V are pages (num_pages, page_size, Hkv, D), and a sequence has seqlen_k slots at most.
  const int* page_table;   // (B, pages of a sequence): page j / page_size has slot j; null: the one page of a sequence is its own number
  const int* first_k;      // (B): slots before are nobody's; null: none is
  const float* k_descale;  // (B, Hkv): what the numbers of a quantised cache are multiplied by; null: k_descale_of_all
  const float* v_descale;
  // Workspaces of decode.cu: parts of 16 rows, their O (parts, 16, kHeadDimV) divided by its sum, and their LSE (parts, 16) in log2 units.
  // fwd_keys_outside.cu has O of its blocks of rows there, not divided, and (reference, sum) of each row.
  float* part_out;
  float* part_lse;
  int* arrived;  // how many parts of something are there; 0 before and after

  long long q_stride_batch, q_stride_seq, q_stride_head;
  long long k_stride_batch, k_stride_seq, k_stride_head;
  long long v_stride_batch, v_stride_seq, v_stride_head;
  long long out_stride_batch, out_stride_seq, out_stride_head;
  long long bias_stride_batch, bias_stride_head, bias_stride_q, bias_stride_k;
  long long mask_stride_batch, mask_stride_head, mask_stride_q, mask_stride_k;
  long long alibi_stride_batch, alibi_stride_head;
  long long sink_stride, seqused_q_stride, seqused_k_stride, cu_seqlens_q_stride, cu_seqlens_k_stride;
  long long page_table_stride, first_k_stride;  // of sequences
  long long k_descale_stride_batch, k_descale_stride_head, v_descale_stride_batch, v_descale_stride_head;

  double softmax_scale;
  double softcap;  // 0: none

  int batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv;  // packed: batch counts sequences, lengths are Tq and Tk
  int head_dim, head_dim_v;                                  // the true ones; tiles may be wider
  int window_left, window_right;                             // distances from the diagonal, 2^31 - 1: unlimited
  int top_left;                                              // the diagonal is j = i, else j = i + used_k - used_q
  int section;               // how many heads, or tokens of packed sequences, the order of the tiles takes together (plan.py)
  int tile_rows, tile_keys;  // of row_tiles and key_tiles
  int page_size, num_pages;
  int split;        // decode.cu: units of a split, or minus the number of splits of a sequence; 0: blocks get equal shares
  int parts;        // that there is room for
  int group;        // query heads of a key head
  int head_groups;  // decode.cu: of `section` key heads each
  // n / group and n / page_size by `quotient` in seqlen.cuh.
  int group_shift, page_shift;
  unsigned group_multiplier, page_multiplier;
  float softmax_scale_log2;
  float k_descale_of_all, v_descale_of_all;
};

// What cache_append.cu takes. `forward` is the argument of the attention after it, whose q, seqused_k and first_k may be workspaces that
// are filled here; its cu_seqlens_k counts the keys of pages, where it is not null.
struct CacheParams {
  ForwardParams forward;

  const void* q;           // (B, Sq, Hq, D) as given, packed (1, Tq, Hq, D); read where it is turned
  const void* k_new;       // (B, Sn, Hkv, D), packed (1, Tq, Hkv, D)
  const void* v_new;       // (B, Sn, Hkv, Dv)
  const void* rotary_cos;  // (rotary_length, rotary_dim / 2), last axis dense
  const void* rotary_sin;
  const int* cache_seqlens;     // (B): slots in use before the call; null: all of them, or what cu_seqlens_k says
  const int* cache_leftpad;     // (B)
  const int* rotary_positions;  // (B): of the first query; null: its slot on the diagonal
  // What is written.
  void* k_cache;  // forward.k and forward.v
  void* v_cache;
  void* rotated_q;  // (B, Sq, Hq, D), compact
  int* used_k;      // (B): slots in use after the call
  int* first_k;     // (B), at most the slots in use before; null without cache_leftpad

  long long q_stride_batch, q_stride_seq, q_stride_head;
  long long k_new_stride_batch, k_new_stride_seq, k_new_stride_head;
  long long v_new_stride_batch, v_new_stride_seq, v_new_stride_head;
  long long rotary_cos_stride, rotary_sin_stride;
  long long cache_seqlens_stride, cache_leftpad_stride, rotary_positions_stride;

  int seqlen_new;  // Sn; packed Tq, or 0 where nothing is appended
  int rotary_dim, rotary_length, rotary_interleaved;
};

// What the kernels of one backward call share. out and lse of `forward` are inputs here; a gradient that is not asked for is null.
struct BackwardParams {
  ForwardParams forward;

  const void* dout;  // (B, Sq, Hq, Dv), any strides
  const void* dlse;  // (B, Hq, Sq)
  void* dq;          // as q, k and v: last axis dense
  void* dk;
  void* dv;
  void* dbias;           // (dbias_batch, dbias_heads, dbias_q, dbias_k), compact: the axes of bias, 1 where it is summed
  float* dalibi_slopes;  // (dalibi_batch, Hq), compact
  void* dsink;           // (Hq), compact
  // Workspaces (B, Hq, Sq), compact, of the accumulator's type.
  void* row_lse;    // +inf where a row sees no key or is not used: its weights are then 0
  void* row_delta;  // rowsum(dO * O) - dLSE, 0 for such a row
  void* row_slope;  // sum over the keys of dS * distance
  void* row_sink;   // the sink's weight * delta
  // Those of the tiled kernels, null without them.
  float* row_reference;  // LSE in log2 units; NaN where rounding it would move a weight too far (gradient.cuh)
  float* dq_sum;         // sums of dQ before the scale (QuerySums in gradient.cuh); null where no kernel adds to them
  int* next_tile;        // how many tiles have been given out beyond a block's first; null where blocks do not ask
  float* part_sums;      // dK and dV of the parts of the tiles that are split; behind next_tile is how many of each have come

  long long dout_stride_batch, dout_stride_seq, dout_stride_head, dout_stride_dim;
  long long lse_stride_batch, lse_stride_head, lse_stride_seq;
  long long dlse_stride_batch, dlse_stride_head, dlse_stride_seq;
  long long dq_stride_batch, dq_stride_seq, dq_stride_head;
  long long dk_stride_batch, dk_stride_seq, dk_stride_head;
  long long dv_stride_batch, dv_stride_seq, dv_stride_head;
  long long dbias_batch, dbias_heads, dbias_q, dbias_k;
  long long dalibi_batch;
  long long dq_sum_width, dq_sum_rows;  // columns of dq_sum; its rows of a head
  long long split_tiles, split_parts;   // so many of the last tiles are dealt out in so many parts of their rows
};

inline constexpr int kMaxParts = 32;

// What merge_states.cu takes, of up to kMaxParts parts: 2.4 kB of the 4 that an argument may have.
struct MergeParams {
  void* out;                    // (B, S, H, Dv), any strides
  void* lse;                    // (B, H, S)
  const void* outs[kMaxParts];  // as out
  const void* lses[kMaxParts];  // as lse

  long long out_stride_batch, out_stride_seq, out_stride_head, out_stride_dim;
  long long lse_stride_batch, lse_stride_head, lse_stride_seq;
  long long outs_stride_batch[kMaxParts], outs_stride_seq[kMaxParts], outs_stride_head[kMaxParts], outs_stride_dim[kMaxParts];
  long long lses_stride_batch[kMaxParts], lses_stride_head[kMaxParts], lses_stride_seq[kMaxParts];

  int parts, batch, seqlen, num_heads, head_dim_v;
  int chunks;  // of 16 bytes, that a row has; at least 1
};

}  // namespace cupyflash
