// cache_append.cu: before the attention over a cache, what it reads: new keys and values in their slots, turned queries, lengths.
//
// Algorithm  Rotary embedding (RoFormer, arXiv 2104.09864) of queries and new keys; these and the new values are written behind the slots
//            that a sequence has in use. What has no slot left, or one of a page that does not exist, is dropped. Products are rounded
//            before they are added up, and scales divide, as on the host: a cache gets the same bits from both.
// Work       A warp has one row of D elements: a query of a head, if queries are turned, then a new key, then a new value. The last warps
//            write lengths, 32 sequences each. Nothing waits for anything; the attention begins when all are done.
// Edges      Packed tokens of no sequence are neither turned nor written.
// Not here   attention: the kernel after it reads pages by key_offset in seqlen.cuh.
#include "../primitives/seqlen.cuh"

namespace cupyflash {

// FMA would round once.
__device__ inline float product(float x, float y) { return __fmul_rn(x, y); }
__device__ inline double product(double x, double y) { return __dmul_rn(x, y); }

// How a sequence grows.
struct Growth {
  int held;            // slots in use before the call
  int count;           // tokens to append, also such as have no slot left
  long long position;  // of its first query
};

template <class C>
__device__ inline Growth growth_of(const CacheParams& p, const SequenceOf<C>& s, int b) {
  const ForwardParams& f = p.forward;
  Growth g{f.seqlen_k, C::kPacked && p.seqlen_new ? rows_of<C>(f, s) : p.seqlen_new, 0};
  if (f.cu_seqlens_k) {
    const int begin = max(f.cu_seqlens_k[b * f.cu_seqlens_k_stride], 0), end = f.cu_seqlens_k[(b + 1) * f.cu_seqlens_k_stride];
    g.held = min(g.held, max(end, begin) - begin);
  }
  if (p.cache_seqlens) g.held = clamp(p.cache_seqlens[b * p.cache_seqlens_stride], 0, g.held);
  g.position =
      p.rotary_positions ? p.rotary_positions[b * p.rotary_positions_stride] : static_cast<long long>(g.held) + g.count - rows_of<C>(f, s);
  return g;
}

// Row `row` of an array (B, tokens, heads), packed (1, tokens, heads).
template <class C>
struct TokenRow {
  int b, h;   // sequence and head
  int token;  // of the batch entry
  int i;      // the same, of the sequence
  SequenceOf<C> s;

  __device__ TokenRow(const ForwardParams& f, int row, int tokens, int heads) : h(row % heads), token(row / heads % tokens) {
    b = C::kPacked ? sequence_at(f.cu_seqlens_q, f.cu_seqlens_q_stride, f.batch, token) : row / heads / tokens;
    s = sequence_of<C>(f, b);
    i = token - static_cast<int>(rows_before<C>(s));
  }
  __device__ bool is_of_sequence() const { return !C::kPacked || i < s.used_q; }
  __device__ long long offset(long long stride_batch, long long stride_seq, long long stride_head) const {
    return b * stride_batch + token * stride_seq + h * stride_head;
  }
};

// Scope: warp. gY = gX / descale, in `dim` elements, of which the first `turned` are turned to `position`.
template <class C, class Stored>
__device__ inline void write_row(const CacheParams& p, const typename C::Element* gX, Stored* gY, int dim, int turned, long long position,
                                 float descale) {
  using Acc = typename AccumulatorOf<typename C::Element>::Type;
  const long long last = p.rotary_length - 1, place = position < 0 ? 0 : position > last ? last : position;
  const int half = turned / 2;
  for (int d = threadIdx.x % 32; d < dim; d += 32) {
    Acc x = widen(gX[d]);
    if (d < turned) {  // the first of a pair becomes x cos - y sin, and the second, of which x is the other, y cos + x sin
      using Rotary = typename C::Rotary;
      const bool first = p.rotary_interleaved ? d % 2 == 0 : d < half;
      const int pair = p.rotary_interleaved ? d / 2 : first ? d : d - half;
      const int other = p.rotary_interleaved ? d ^ 1 : first ? d + half : d - half;
      const Acc cos = static_cast<Acc>(widen(static_cast<const Rotary*>(p.rotary_cos)[place * p.rotary_cos_stride + pair]));
      const Acc sin = static_cast<Acc>(widen(static_cast<const Rotary*>(p.rotary_sin)[place * p.rotary_sin_stride + pair]));
      const Acc part = product(widen(gX[other]), sin);
      x = product(x, cos) + (first ? -part : part);
    }
    if constexpr (!kSame<Stored, typename C::Element>) x /= static_cast<Acc>(descale);
    narrow(x, gY[d]);
  }
}

template <class C>
__device__ inline void turn_query(const CacheParams& p, int row) {
  using Element = typename C::Element;
  const ForwardParams& f = p.forward;
  const TokenRow<C> r(f, row, f.seqlen_q, f.num_heads_q);
  if (!r.is_of_sequence()) return;
  const Element* gQ = static_cast<const Element*>(p.q) + r.offset(p.q_stride_batch, p.q_stride_seq, p.q_stride_head);
  const long long position = growth_of<C>(p, r.s, r.b).position + r.i;
  write_row<C>(p, gQ, static_cast<Element*>(p.rotated_q) + static_cast<long long>(row) * f.head_dim, f.head_dim, p.rotary_dim, position,
               1.0f);
}

// The last new key has the position of the last query.
template <class C, bool kKey>
__device__ inline void append_token(const CacheParams& p, int row) {
  using Element = typename C::Element;
  using Cached = typename C::Cached;
  const ForwardParams& f = p.forward;
  const TokenRow<C> r(f, row, p.seqlen_new, f.num_heads_kv);
  if (!r.is_of_sequence()) return;
  const Growth g = growth_of<C>(p, r.s, r.b);
  if (r.i >= f.seqlen_k - g.held) return;
  const int slot = g.held + r.i, page = page_of(f, r.b, slot);
  if (page < 0 || page >= f.num_pages) return;
  const long long page_slot = slot_in_page(f, slot);
  if constexpr (kKey) {
    const Element* gX = static_cast<const Element*>(p.k_new) + r.offset(p.k_new_stride_batch, p.k_new_stride_seq, p.k_new_stride_head);
    Cached* gY = static_cast<Cached*>(p.k_cache) + page * f.k_stride_batch + page_slot * f.k_stride_seq + r.h * f.k_stride_head;
    const float descale = descale_of(f.k_descale, f.k_descale_of_all, r.b * f.k_descale_stride_batch + r.h * f.k_descale_stride_head);
    write_row<C>(p, gX, gY, f.head_dim, p.rotary_dim, g.position + rows_of<C>(f, r.s) - g.count + r.i, descale);
  } else {
    const Element* gX = static_cast<const Element*>(p.v_new) + r.offset(p.v_new_stride_batch, p.v_new_stride_seq, p.v_new_stride_head);
    Cached* gY = static_cast<Cached*>(p.v_cache) + page * f.v_stride_batch + page_slot * f.v_stride_seq + r.h * f.v_stride_head;
    const float descale = descale_of(f.v_descale, f.v_descale_of_all, r.b * f.v_descale_stride_batch + r.h * f.v_descale_stride_head);
    write_row<C>(p, gX, gY, f.head_dim_v, 0, 0, descale);
  }
}

template <class C>
__device__ inline void write_lengths(const CacheParams& p, int b) {
  const ForwardParams& f = p.forward;
  if (b >= f.batch) return;
  const Growth g = growth_of<C>(p, sequence_of<C>(f, b), b);
  p.used_k[b] = g.held + min(g.count, f.seqlen_k - g.held);
  if (p.first_k) p.first_k[b] = clamp(p.cache_leftpad[b * p.cache_leftpad_stride], 0, g.held);
}

template <class C>
__device__ inline void append(const CacheParams& p, int row) {
  const ForwardParams& f = p.forward;
  const int batches = C::kPacked ? 1 : f.batch;  // plan.py makes sure that there are fewer than 2^31 rows
  const int queries = p.rotary_dim ? batches * f.seqlen_q * f.num_heads_q : 0, keys = batches * p.seqlen_new * f.num_heads_kv;
  if (row < queries) {
    turn_query<C>(p, row);
  } else if (row < queries + keys) {
    append_token<C, true>(p, row - queries);
  } else if (row < queries + 2 * keys) {
    append_token<C, false>(p, row - queries - keys);
  } else {
    write_lengths<C>(p, 32 * (row - queries - 2 * keys) + threadIdx.x % 32);
  }
}

}  // namespace cupyflash

// Without a number of blocks ptxas keeps to 32 or 40 registers, for which some variants spill one.
extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 8) cache_append(const __grid_constant__ cupyflash::CacheParams p) {
  cupyflash::append<Config>(p, blockIdx.x * Config::kWarps + threadIdx.x / 32);
}
