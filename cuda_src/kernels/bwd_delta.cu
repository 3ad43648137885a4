// bwd_delta.cu: before the backward, what each query row must know of its other keys; any dtype.
//
// Algorithm  delta_i = dO_i . O_i - dLSE_i (FlashAttention-2, arXiv 2307.08691, algorithm 2, line 4; dLSE: a gradient through the LSE adds
//            P dLSE to dS, so it joins delta). The LSE is copied, of any strides, into a compact workspace.
// Work       A warp has 16, 8 or 4 rows of one head, by their width, kLanes lanes a row. Each lane reads kPasses chunks of 16 bytes of
//            O and of dO before it uses the first: this kernel is bound by memory. With a warp a row and elements one by one it took 4.3
//            and 2.2 times as long as its bytes at D = 64 and 128 (H200, 2026-11-30). Rows that are not aligned are read by elements.
// Edges      A row that sees no key, or past its used length, has LSE = +inf and delta = 0 from here on: P = exp(S - LSE) = 0. Nothing of
//            its dO, O and dLSE is used, so a NaN there goes nowhere.
// Tiles      What a tiled kernel asks for besides: the LSE in its units, and zeros where it adds up dQ or counts tiles by atomics.
// Sink       Its gradient is -sum over rows of P_sink * delta: each row's part is left in row_sink for bwd_sum.
#include "../primitives/work.cuh"

namespace cupyflash {

template <class C>
struct Lanes {
  static constexpr int kLanes = C::kHeadDimV / 8;  // of a row: 8 elements of 16 bits each
  static constexpr int kAtOnce = 32 / kLanes;      // rows
  static constexpr int kPasses = 4;                // a lane writes what follows of one row, or of none
  static constexpr int kRows = kPasses * kAtOnce;
  static_assert(kPasses <= kLanes && 16 % kRows == 0, "a lane a row; sums of dQ are tiles of 16 rows");
};

// Zeros for the sums of dQ of a warp's rows, one after another in whatever order they lie, and for those past the end of the head.
template <class C>
__device__ inline void zero_sums(const BackwardParams& p, int b, int h, int row) {
  const ForwardParams& f = p.forward;
  const int width = static_cast<int>(p.dq_sum_width), rows = static_cast<int>(p.dq_sum_rows);
  const int count = row + Lanes<C>::kRows < (C::kPacked ? rows : f.seqlen_q) ? Lanes<C>::kRows : rows - row;
  float* g = p.dq_sum + ((static_cast<long long>(b) * f.num_heads_q + h) * rows + row) * width;
#pragma unroll 8
  for (int n = threadIdx.x % 32 * 4; n < count * width; n += 32 * 4) {
    *reinterpret_cast<Elements<float, 4>*>(g + n) = Elements<float, 4>{};
  }
}

// dO . O of the rows row, row + kAtOnce, ..., each in its lanes. A lane whose row is not among the `used` ones, or that has no column,
// reads another one for nothing: that takes less than to choose zeros.
template <class C, class Acc>
__device__ inline void dot_rows(const BackwardParams& p, int b, int h, int row, int used, Acc (&rDot)[Lanes<C>::kPasses]) {
  using Out = typename C::Out;
  using L = Lanes<C>;
  constexpr int kElements = 16 / sizeof(Out);
  const ForwardParams& f = p.forward;
  const int lane = threadIdx.x % L::kLanes, first = min(row, max(used - 1, 0));
  const long long stride_dim = C::kUnaligned ? p.dout_stride_dim : 1;
  const Out* gO = static_cast<const Out*>(f.out) + b * f.out_stride_batch + first * f.out_stride_seq + h * f.out_stride_head;
  const Out* gdO = static_cast<const Out*>(p.dout) + b * p.dout_stride_batch + first * p.dout_stride_seq + h * p.dout_stride_head;
#pragma unroll 1
  for (int n = 0; n < C::kHeadDimV / (L::kLanes * kElements); ++n) {
    const int chunk = (n * L::kLanes + lane) * kElements;
    const int d = chunk < f.head_dim_v ? chunk : 0;
    const Out *gO_i = gO + d, *gdO_i = gdO + d * stride_dim;
    auto advance = [&](int m) {
      if (first + (m + 1) * L::kAtOnce < used) {
        gO_i += L::kAtOnce * f.out_stride_seq;
        gdO_i += L::kAtOnce * p.dout_stride_seq;
      }
    };
    if constexpr (C::kUnaligned) {  // one by one, in the same order: the same sum bit by bit
#pragma unroll 1
      for (int m = 0; m < L::kPasses; ++m) {
        Acc dot = 0;
        for (int e = 0; e < kElements && chunk + e < f.head_dim_v; ++e) {
          dot += static_cast<Acc>(widen(gdO_i[e * stride_dim])) * static_cast<Acc>(widen(gO_i[e]));
        }
#pragma unroll
        for (int other = 0; other < L::kPasses; ++other) rDot[other] += m == other ? dot : Acc(0);
        advance(m);
      }
    } else {
      Elements<Out, kElements> rO[L::kPasses], rdO[L::kPasses];
#pragma unroll
      for (int m = 0; m < L::kPasses; ++m) {
        global_load_16(reinterpret_cast<unsigned (&)[4]>(rO[m]), gO_i);
        global_load_16(reinterpret_cast<unsigned (&)[4]>(rdO[m]), gdO_i);
        advance(m);
      }
#pragma unroll
      for (int m = 0; m < L::kPasses; ++m) {
        Acc dot = 0;
#pragma unroll
        for (int e = 0; e < kElements; ++e) dot += static_cast<Acc>(widen(rdO[m].x[e])) * static_cast<Acc>(widen(rO[m].x[e]));
        if (chunk < f.head_dim_v) rDot[m] += dot;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < L::kPasses; ++m) {
#pragma unroll
    for (int other = L::kLanes / 2; other > 0; other /= 2) rDot[m] += __shfl_xor_sync(kWarp, rDot[m], other);
  }
}

// What the other kernels read of row i.
template <class C, class Acc>
__device__ inline void write_row(const BackwardParams& p, int b, int h, int i, Acc lse, Acc delta, bool empty) {
  const ForwardParams& f = p.forward;
  const long long row = (static_cast<long long>(b) * f.num_heads_q + h) * f.seqlen_q + i;
  static_cast<Acc*>(p.row_lse)[row] = lse;
  static_cast<Acc*>(p.row_delta)[row] = delta;
  if (p.row_reference) {
    const float reference = static_cast<float>(lse) * static_cast<float>(kLog2E);
    const bool in_range = !(fabsf(reference) > kLargestReference) || empty;
    p.row_reference[row] = in_range ? reference : not_a_number(0.0f);
  }
  if constexpr (C::kSink) {
    if (p.dsink) {
      const Acc sink = static_cast<Acc>(widen(static_cast<const typename C::Sink*>(f.sink)[h * f.sink_stride]));
      static_cast<Acc*>(p.row_sink)[row] = empty ? Acc(0) : exp_of(sink - lse) * delta;
    }
  }
}

// Scope: warp.
template <class C>
__device__ inline void rows_delta(const BackwardParams& p, int b, int h, int row) {
  using Acc = typename AccumulatorOf<typename C::Element>::Type;
  using L = Lanes<C>;
  const ForwardParams& f = p.forward;
  const int pass = threadIdx.x % L::kLanes;  // the one whose row the lane writes
  const int first = row + threadIdx.x % 32 / L::kLanes, i = first + pass * L::kAtOnce;
  const bool writes = pass < L::kPasses && i < f.seqlen_q;
  Acc lse = 0, dlse = 0;  // read ahead of what takes longer
  if (writes) {
    lse = static_cast<const Acc*>(f.lse)[b * p.lse_stride_batch + h * p.lse_stride_head + i * p.lse_stride_seq];
    if (p.dlse) dlse = static_cast<const Acc*>(p.dlse)[b * p.dlse_stride_batch + h * p.dlse_stride_head + i * p.dlse_stride_seq];
  }
  if (p.dq_sum) zero_sums<C>(p, b, h, row);
  if (C::kPacked && row >= f.seqlen_q) return;  // there are more sums than rows

  // Packed: rows of all sequences, used or not.
  const int used = C::kPacked ? f.seqlen_q : sequence_of<C>(f, b).used_q;
  Acc rDot[L::kPasses] = {};
  dot_rows<C>(p, b, h, first, used, rDot);
  Acc delta = rDot[0];
#pragma unroll
  for (int m = 1; m < L::kPasses; ++m) delta = pass == m ? rDot[m] : delta;

  if (!writes) return;
  bool empty = i >= used || lse == -infinity(Acc());
  if constexpr (C::kPacked && C::kSink) {  // bwd_sum adds up whole heads; no other kernel reads what rows that are not used leave
    if (p.dsink && !empty) empty = !is_used_row<C>(f, i);
  }
  write_row<C>(p, b, h, i, empty ? infinity(Acc()) : lse, empty ? Acc(0) : delta - dlse, empty);
}

}  // namespace cupyflash

// Eight blocks an SM have 128 kB on their way, three times what its memory needs. Without a number ptxas keeps to 36 registers, for which
// it uses what the first loads bring before it issues the last.
extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 8) bwd_delta(const __grid_constant__ cupyflash::BackwardParams p) {
  constexpr int kRows = cupyflash::Lanes<Config>::kRows;
  if (p.next_tile && blockIdx.x == 0) {
    for (int n = threadIdx.x; n <= p.split_tiles; n += 32 * Config::kWarps) p.next_tile[n] = 0;
  }
  const int length = Config::kPacked && p.dq_sum ? static_cast<int>(p.dq_sum_rows) : p.forward.seqlen_q;
  const cupyflash::HeadRows block(p.forward, kRows * Config::kWarps, length);
  const int row = block.row + threadIdx.x / 32 * kRows;
  if (row < length) cupyflash::rows_delta<Config>(p, block.b, block.h, row);
}
