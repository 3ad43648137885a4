// bwd_sm80_dbias.cu: the gradient of a bias by cp.async and mma.sync, in one fixed order of additions, for fp16 and bf16 on sm_80 and
// newer. Read it after bwd_sm80.cu.
//
// Algorithm  dBias_ij = dS_ij, summed in float over the axes along which the bias was broadcast, whose size is 1 in dBias. S and dP are
//            computed again, as in bwd_sm80, which has no room for these sums.
// Work       One block computes kBlockM x kBlockN elements: along an axis that is summed, one. It walks over all that adds to them.
// Threads    kWarps warps, kWarpsM of them along the rows of S and dP; the sums of each element stay in registers.
// Smem       sQ, sdO, sK, sV, and the sums when all is added.
// Edges      Tiles without a visible pair are left out; what no pair adds to is 0.
#include "../primitives/gradient.cuh"

namespace cupyflash {

template <class C>
struct Smem {
  using TileQ = Tile<C::kBlockM, C::kHeadDim>;
  using TileO = Tile<C::kBlockM, C::kHeadDimV>;
  using TileK = Tile<C::kBlockN, C::kHeadDim>;
  using TileV = Tile<C::kBlockN, C::kHeadDimV>;
  alignas(128) char q[TileQ::kBytes];
  alignas(128) char dout[TileO::kBytes];
  alignas(128) char k[TileK::kBytes];
  alignas(128) char v[TileV::kBytes];
  float sums[C::kBlockM][C::kBlockN];
};

// The part of an axis that one block adds up: all of it, where it is summed, else one entry.
struct Part {
  int first, last;
  bool is_summed;

  // `rest` is divided by the number of parts. `count` entries, of which dBias has `size`: as many, or 1.
  __device__ Part(long long& rest, int count, long long size, int block) {
    is_summed = size == 1;
    const int entries = (count + block - 1) / block;
    const int parts = is_summed ? 1 : entries;
    first = static_cast<int>(rest % parts);
    last = is_summed ? entries : first + 1;
    rest /= parts;
  }
};

// One tile: adds dS of its pairs to rSum.
template <class C, int kTiles, int kKeys>
__device__ inline void add_tile(const BackwardParams& p, Smem<C>& smem, const Work<C>& w, int j, float (&rSum)[kTiles][kKeys / 8][4],
                                int warp_row, int warp_key) {
  using Element = typename C::Element;
  using M = Smem<C>;
  const ForwardParams& f = p.forward;
  constexpr int kThreads = 32 * C::kWarps;
  constexpr bool kByElement = C::kUnaligned || !kSame<Element, typename C::Out>;
  const int h_kv = w.h / (f.num_heads_q / f.num_heads_kv), key = j * C::kBlockN;
  const int rows = w.s.used_q - w.row, keys = w.s.used_k - key;
  const auto* gQ = static_cast<const Element*>(f.q) + w.b * f.q_stride_batch + w.h * f.q_stride_head + w.row * f.q_stride_seq;
  const auto* gK = static_cast<const Element*>(f.k) + w.b * f.k_stride_batch + h_kv * f.k_stride_head + key * f.k_stride_seq;
  const auto* gV = static_cast<const Element*>(f.v) + w.b * f.v_stride_batch + h_kv * f.v_stride_head + key * f.v_stride_seq;
  const auto* gdO =
      static_cast<const typename C::Out*>(p.dout) + w.b * p.dout_stride_batch + w.h * p.dout_stride_head + w.row * p.dout_stride_seq;
  __syncthreads();  // all have done with the tile before
  load_tile<typename M::TileQ, kThreads, true, C::kUnaligned>(smem.q, gQ, f.q_stride_seq, rows, f.head_dim);
  load_tile<typename M::TileK, kThreads, true, C::kUnaligned>(smem.k, gK, f.k_stride_seq, keys, f.head_dim);
  load_tile<typename M::TileV, kThreads, true, C::kUnaligned>(smem.v, gV, f.v_stride_seq, keys, f.head_dim_v);
  if constexpr (kByElement) {
    load_elements<Element, typename M::TileO, kThreads, true>(smem.dout, gdO, p.dout_stride_seq, p.dout_stride_dim, rows, f.head_dim_v);
  } else {
    load_tile<typename M::TileO, kThreads, true, false>(smem.dout, gdO, p.dout_stride_seq, rows, f.head_dim_v);
  }
  cp_async_commit();
  RowVectors<kTiles> vectors;
  const long long row = (static_cast<long long>(w.b) * f.num_heads_q + w.h) * f.seqlen_q + w.row + warp_row;
  read_vectors(vectors, static_cast<const float*>(p.row_lse) + row, static_cast<const float*>(p.row_delta) + row, rows - warp_row);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {  // an LSE out of the range of row_reference spoils no other element here
    for (float& reference : vectors.reference[m]) reference *= static_cast<float>(kLog2E);
  }
  cp_async_wait<0>();
  __syncthreads();  // the tile has arrived for all threads

  float rS[kTiles][kKeys / 8][4], rdP[kTiles][kKeys / 8][4];
  multiply_qk<Element, typename M::TileQ, typename M::TileK, kTiles, kKeys, C::kHeadDim>(rS, smem.q, smem.k, warp_row, warp_key);
  multiply_qk<Element, typename M::TileO, typename M::TileV, kTiles, kKeys, C::kHeadDimV>(rdP, smem.dout, smem.v, warp_row, warp_key,
                                                                                          vectors.minus_delta);
  auto step = [&](auto masked) {
    gradient_step<C, decltype(masked)::value, kTiles, kKeys>(
        f, w.context, w.s, w.row + warp_row, key + warp_key, rS, rdP, vectors,
        [&](int m, int n, int e, int, int, float d_score) { rSum[m][n][e] += d_score; });
  };
  if (w.keys.is_full(j)) {
    step(Constant<false>{});
  } else {
    step(Constant<true>{});
  }
}

template <class C>
__device__ inline void backward(const BackwardParams& p, Smem<C>& smem) {
  const ForwardParams& f = p.forward;
  constexpr int kThreads = 32 * C::kWarps;
  constexpr int kTiles = C::kBlockM / C::kWarpsM / 16, kKeys = C::kBlockN / (C::kWarps / C::kWarpsM);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % C::kWarpsM * 16 * kTiles, warp_key = warp / C::kWarpsM * kKeys;

  long long rest = blockIdx.x;
  const Part keys(rest, f.seqlen_k, p.dbias_k, C::kBlockN);
  const Part rows(rest, f.seqlen_q, p.dbias_q, C::kBlockM);
  const Part heads(rest, f.num_heads_q, p.dbias_heads, 1);
  const Part batches(rest, f.batch, p.dbias_batch, 1);
  float rSum[kTiles][kKeys / 8][4] = {};
  for (int b = batches.first; b < batches.last; ++b) {
    for (int h = heads.first; h < heads.last; ++h) {
      for (int i = rows.first; i < rows.last; ++i) {
        const Work<C> w(f, b * f.num_heads_q + h, i * C::kBlockM);
        const int last = min(keys.last, w.keys.last);
        for (int j = max(keys.first, w.keys.first); j < last; ++j) {
          add_tile<C, kTiles, kKeys>(p, smem, w, j, rSum, warp_row, warp_key);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        smem.sums[warp_row + 16 * m + 8 * (e / 2) + lane / 4][warp_key + 8 * n + 2 * (lane % 4) + e % 2] = rSum[m][n][e];
      }
    }
  }
  __syncthreads();  // the sums are there
  const int row = rows.is_summed ? 0 : rows.first * C::kBlockM, key = keys.is_summed ? 0 : keys.first * C::kBlockN;
  const int height = rows.is_summed ? 1 : min(C::kBlockM, f.seqlen_q - row), width = keys.is_summed ? 1 : min(C::kBlockN, f.seqlen_k - key);
  auto* g =
      static_cast<typename C::Bias*>(p.dbias) +
      (((batches.is_summed ? 0 : batches.first) * p.dbias_heads + (heads.is_summed ? 0 : heads.first)) * p.dbias_q + row) * p.dbias_k + key;
  for (int n = threadIdx.x; n < height * width; n += kThreads) {
    const int r = n / width, c = n % width;
    float sum = 0;
    for (int i = r; i < (rows.is_summed ? C::kBlockM : r + 1); ++i) {
      for (int j = c; j < (keys.is_summed ? C::kBlockN : c + 1); ++j) sum += smem.sums[i][j];
    }
    narrow(sum, g[r * p.dbias_k + c]);
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 1) bwd_sm80_dbias(const __grid_constant__ cupyflash::BackwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::backward<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
