// fwd_keys_outside.cu: attention forward with the loop over keys outside and that over query rows inside, kept for comparison: no call
// comes to it but by `cupyflash-bench --family fwd_keys_outside`. Read it beside fwd_sm80.cu, whose products, softmax and copies it has.
//
// Algorithm  FlashAttention (arXiv 2205.14135, algorithm 1): a tile of K and V stays in shared memory, and blocks of query rows pass by,
//            whose O_i, m_i and l_i come from memory and go back. O_i is float32 and, as in fwd_sm80, divided by l_i only at its last
//            tile: so the order of the loops is all that differs.
// Work       One block computes a head, tile after tile of its keys: with fewer heads than SMs some have nothing to do.
// Bytes      Of O alone 8 Sq Sk Dv / (keys of a tile) a head, read and written: 4 Sq Sk for 256 keys at Dv = 128, where standard attention
//            moves 8 Sq Sk (S and P, 16 bits, written and read) and fwd_sm80 2 Sq Dv. So a tile has as many keys as there is room for.
// Threads    kWarps warps, each with 16 rows of S and O in registers.
// Smem       kStages x kBlockN keys of K and V, multiplied kBlockN at a time; two blocks of Q: i + 1 is copied while i is multiplied.
// Way out    As in fwd_sm80.cu: a row that left the range is computed again by attend_row.
#include "../primitives/mma.cuh"
#include "../primitives/softmax.cuh"

namespace cupyflash {

template <class C>
struct Smem {
  using TileQ = Tile<C::kBlockM, C::kHeadDim>;
  using TileK = Tile<C::kBlockN, C::kHeadDim>;
  using TileV = Tile<C::kBlockN, C::kHeadDimV>;
  alignas(128) char q[2][TileQ::kBytes];
  alignas(128) char k[C::kStages][TileK::kBytes];
  alignas(128) char v[C::kStages][TileV::kBytes];
};

template <class C>
__device__ inline void forward(const ForwardParams& p, Smem<C>& smem) {
  using Element = typename C::Element;
  using S = Smem<C>;
  constexpr int kThreads = 32 * C::kWarps, kColumns = C::kHeadDimV / 8;
  static_assert(16 * C::kWarps == C::kBlockM, "a warp owns 16 rows");
  const int b = blockIdx.x / p.num_heads_q, h = blockIdx.x % p.num_heads_q;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const SequenceOf<C> s = sequence_of<C>(p, b);
  const int row_blocks = (s.used_q + C::kBlockM - 1) / C::kBlockM;

  const Element* gQ = static_cast<const Element*>(p.q) + b * p.q_stride_batch + h * p.q_stride_head;
  const Element* gK = static_cast<const Element*>(p.k) + b * p.k_stride_batch + h / p.group * p.k_stride_head;
  const Element* gV = static_cast<const Element*>(p.v) + b * p.v_stride_batch + h / p.group * p.v_stride_head;
  // O_i as it lies in registers, so that a thread reads what it wrote itself, 16 bytes at a time; m_i and l_i.
  const long long first_row = static_cast<long long>(blockIdx.x) * row_blocks * C::kBlockM;
  auto* gO = reinterpret_cast<Elements<float, 4>*>(p.part_out + first_row * C::kHeadDimV) + threadIdx.x;
  auto* gState = reinterpret_cast<Elements<float, 2>*>(p.part_lse) + first_row + warp_row + lane / 4;

  auto load_q = [&](int i) {
    const int row = i * C::kBlockM;
    load_tile<typename S::TileQ, kThreads, true, C::kUnaligned>(smem.q[i % 2], gQ + row * p.q_stride_seq, p.q_stride_seq, s.used_q - row,
                                                                p.head_dim);
    cp_async_commit();
  };

  const int seen_k = visible_keys<C>(p, s, 0, s.used_q).last;            // by any row
  for (int j = 0; j == 0 || j * C::kBlockN < seen_k; j += C::kStages) {  // K_j and V_j: the key blocks from j on
    __syncthreads();                                                     // all have done with the tile before
#pragma unroll 1
    for (int n = 0; n < C::kStages; ++n) {
      const int key = (j + n) * C::kBlockN, valid = s.used_k - key;
      load_tile<typename S::TileK, kThreads, true, C::kUnaligned>(smem.k[n], gK + key * p.k_stride_seq, p.k_stride_seq, valid, p.head_dim);
      load_tile<typename S::TileV, kThreads, true, C::kUnaligned>(smem.v[n], gV + key * p.v_stride_seq, p.v_stride_seq, valid,
                                                                  p.head_dim_v);
    }
    // Blocks whose rows see none of these keys are passed over, but not by the first tile: no other may meet them.
    const int first = j == 0 ? 0 : visible_rows<C>(p, s, j * C::kBlockN, s.used_k).first / C::kBlockM;
    load_q(first);
    if (kFused<C> && p.softmax_scale_log2 < 0) {  // the row maximum is taken before the scale, so the scale must not turn the order
      cp_async_wait<0>();
      __syncthreads();  // K is there
      for (int word = threadIdx.x; word < C::kStages * S::TileK::kBytes / 4; word += kThreads) {
        reinterpret_cast<unsigned*>(smem.k)[word] ^= 0x80008000u;
      }
    }

    for (int i = first; i < row_blocks; ++i) {  // Q_i
      cp_async_wait<0>();
      __syncthreads();  // it has arrived for all threads, and all have done with the buffer of block i + 1
      if (i + 1 < row_blocks) load_q(i + 1);
      const Work<C> w(p, b, h, i * C::kBlockM, s);

      float rO[1][kColumns][4];
      RowState<1> state;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const Elements<float, 4> four = j == 0 ? Elements<float, 4>{} : gO[(i * kColumns + n) * kThreads];
#pragma unroll
        for (int e = 0; e < 4; ++e) rO[0][n][e] = four.x[e];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Elements<float, 2> row = j == 0 ? Elements<float, 2>{-infinity(0.0f), 0} : gState[i * C::kBlockM + 8 * r];
        state.reference[0][r] = row.x[0];
        state.sum[0][r] = lane % 4 == 0 ? row.x[1] : 0.0f;  // in the first of the row's four lanes
      }

      auto step = [&](auto masked, int n) {
        float rS[1][C::kBlockN / 8][4];
        multiply_qk<Element, typename S::TileQ, typename S::TileK, 1, C::kBlockN, C::kHeadDim>(rS, smem.q[i % 2], smem.k[n], warp_row);
        softmax_step<C, decltype(masked)::value, 1>(p, w, j + n, rS, state, warp_row, [&] { rescale_output<C, 1>(rO, state); });
        multiply_pv<Element, typename S::TileV, 1, C::kBlockN, C::kHeadDimV>(rO, rS, smem.v[n]);
      };
#pragma unroll 1
      for (int n = 0; n < C::kStages && j + n < w.keys.last; ++n) {
        if (w.keys.is_full(j + n)) {
          step(Constant<false>{}, n);
        } else {
          step(Constant<true>{}, n);
        }
      }

      if (j + C::kStages >= w.keys.last) {  // these rows have seen all of their keys
        auto store = [&](int row, int column, Pair<typename C::Out> pair) { store_pair<C>(p, w, w.row + warp_row + row, column, pair); };
        unsigned again = finish<C, 1>(p, w, rO, state, warp_row, store, [](int) {});
        __syncwarp();  // what finish wrote of these rows is overwritten by other lanes
        for (; again; again &= again - 1) attend_row<C>(p, b, h, w.row + warp_row + __ffs(again) - 1);
        continue;
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) gO[(i * kColumns + n) * kThreads] = {rO[0][n][0], rO[0][n][1], rO[0][n][2], rO[0][n][3]};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = state.sum[0][r];
        sum += __shfl_xor_sync(kWarp, sum, 1);
        sum += __shfl_xor_sync(kWarp, sum, 2);
        if (lane % 4 == 0) gState[i * C::kBlockM + 8 * r] = {state.reference[0][r], sum};
      }
    }
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 1) fwd_keys_outside(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(128) char dynamic_smem[];
  cupyflash::forward<Config>(p, *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem));
}
