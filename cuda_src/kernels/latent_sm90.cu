// latent_sm90.cu: few query rows over latent keys, whose first columns are the values, for fp16 and bf16 on sm_90a. Read it after
// decode.cu.
//
// Algorithm  The absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): all query heads read one key
//            head of latent and rotated columns, and V is its latent ones. So a key is read once, for both products.
// Work       Shared out and merged as in decode.cu; a tile is 64 rows.
// Threads    All warps copy 8 keys of a unit each. Two warpgroups have all rows: of S half of the keys, of O half of the columns, since no
//            warpgroup has registers for all of O.
// Loop       S of both halves; the largest score of each row goes over, so that both move their reference alike; P goes over; O += P V.
//            Three barriers a unit, and the next unit is on its way meanwhile. What a unit of 64 keys takes at D = 576 and 512: 72 kB of
//            memory, 3,500 clocks of an SM's share of 4.7 TB/s; 2,200 of the tensor cores; 2,300 of shared memory.
// Smem       sQ; kStages units, in whose place O lies at the end; P; what the warpgroups tell one another.
// Way out    As decode.cu.
#include "../primitives/parts.cuh"
#include "../primitives/wgmma.cuh"

namespace cupyflash {

template <class C>
struct SmemOfAll {
  using TileQ = Panels<C::kBlockM, C::kHeadDim>;
  using TileK = Panels<C::kBlockN, C::kHeadDim>;
  using TileP = Panels<C::kBlockM, C::kBlockN>;
  static constexpr int kPitch = C::kHeadDimV + 8;  // of rows of O: lanes of a row and of the next seven fall into different banks
  alignas(1024) char q[TileQ::kBytes];
  union {
    alignas(1024) char keys[C::kStages][TileK::kBytes];
    float out[1][C::kBlockM][kPitch];
  };
  alignas(1024) char weights[TileP::kBytes];
  float reference[1][C::kBlockM], sum[1][C::kBlockM];
  float told[2][C::kBlockM];  // by each warpgroup: the largest score of its keys, at the end the sum of its weights
  Shared<C> shared;
};

// The keys of a segment, as they come: 8 of each unit by each warp, eight lanes a key.
template <class C>
struct LatentKeys {
  using Element = typename C::Element;
  static constexpr int kOwn = C::kBlockN / C::kWarps;
  static_assert(kOwn == 8, "a lane for each key, modulo 8");
  const ForwardParams& p;
  const Extent<C>& e;
  const Segment<C>& g;
  Smem<C>& smem;
  int page;  // of the lane's key of the next unit, as the table has it

  __device__ LatentKeys(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem) : p(p), e(e), g(g), smem(smem) {
    look_up(g.unit);
  }
  __device__ int first_key(int unit) const { return unit * C::kBlockN + threadIdx.x / 32 * kOwn; }
  __device__ bool exists(int key) const { return key >= e.keys.first && key < e.keys.last; }
  __device__ void look_up(int unit) {
    const int key = first_key(unit) + threadIdx.x % kOwn;
    page = C::kPaged && exists(key) ? page_of(p, g.b, key) : 0;
  }
  __device__ void load(int unit) {
    if (unit < g.last_unit) {
      const int lane = threadIdx.x % 32, key = first_key(unit), own = key + lane % kOwn;
      const auto* from = static_cast<const Element*>(p.k) + g.h_kv * p.k_stride_head;
      if constexpr (C::kPaged) {
        from += clamp(page, 0, p.num_pages - 1) * p.k_stride_batch + slot_in_page(p, own) * p.k_stride_seq;
        look_up(unit + 1);
      } else {
        from += (C::kPacked ? 0 : g.b) * p.k_stride_batch + (keys_before<C>(e.s) + own) * p.k_stride_seq;
      }
      char* const tile = smem.keys[(unit - g.unit) % C::kStages];
#pragma unroll
      for (int n = 0; n < kOwn / 4; ++n) {
        const int row = 4 * n + lane / 8;
        const auto* const begin = reinterpret_cast<const Element*>(__shfl_sync(kWarp, reinterpret_cast<unsigned long long>(from), row));
        const bool there = exists(key + row);
#pragma unroll
        for (int panel = 0; panel < Smem<C>::TileK::kCount; ++panel) {
          const int chunk = 8 * panel + lane % 8;
          cp_async_16(smem_address(tile + Smem<C>::TileK::at(threadIdx.x / 32 * kOwn + row, chunk)), begin + 8 * chunk,
                      there && 8 * chunk < p.head_dim ? 16 : 0);
        }
      }
    }
    cp_async_commit();
  }
};

// Scope: block. All keys of a segment; O, references and sums go to shared memory.
template <class C>
__device__ inline void compute_latent(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem) {
  using Element = typename C::Element;
  using S = Smem<C>;
  constexpr int kKeys = C::kBlockN / 2, kColumns = C::kHeadDimV / 2;  // of a warpgroup
  static_assert(C::kBlockM == 64 && C::kBlockN == 64 && C::kWarps == 8 && C::kStages == 2 && kColumns % 64 == 0);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, own_row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // and own_row + 8
  const unsigned sQ = smem_address(smem.q), sP = smem_address(smem.weights);
  // Where the lane puts a chunk of 8 keys of P of one of the warp's rows, by stmatrix.
  const int row_of_p = threadIdx.x / 32 % 4 * 16 + lane % 16, chunk_of_p = group * kKeys / 8 + lane / 16;
  float rO[1][kColumns / 8][4] = {};
  float reference[2] = {-infinity(0.0f), -infinity(0.0f)}, sum[2] = {};
  LatentKeys<C> keys(p, e, g, smem);
  const LaneRows<C> rows(p, e, g, threadIdx.x / 32 % 4 * 16);
  keys.load(g.unit);
#pragma unroll 1
  for (int unit = g.unit; unit < g.last_unit; ++unit) {
    const unsigned sK = smem_address(smem.keys[(unit - g.unit) % C::kStages]);
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();  // this unit is there, and all have done with the one before it
    keys.load(unit + 1);
    float rS[1][kKeys / 8][4];
    wgmma_fence();
    const unsigned long long a = descriptor(sQ, 16), b = descriptor(sK + group * kKeys * 128, 16);
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 16; ++n) {
      const int panel = n / 4, step = n % 4 * 2;  // 32 bytes, in units of 16
      wgmma_ss(rS[0], a + (panel * (S::TileQ::kPanelBytes >> 4) + step), b + (panel * (S::TileK::kPanelBytes >> 4) + step), n > 0,
               Element{});
    }
    wgmma_commit();
    wgmma_wait<0>();
    float top[2];
    score_keys<C>(p, e, rows, nullptr, unit * C::kBlockN + group * kKeys, rS, top);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 == 0) smem.told[group][own_row + 8 * r] = top[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], smem.told[group ^ 1][own_row + 8 * r]);
    weigh<C>(p, top, rS, rO, reference, sum);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const unsigned packed[4] = {pack(rS[0][2 * n][0], rS[0][2 * n][1], Element{}), pack(rS[0][2 * n][2], rS[0][2 * n][3], Element{}),
                                  pack(rS[0][2 * n + 1][0], rS[0][2 * n + 1][1], Element{}),
                                  pack(rS[0][2 * n + 1][2], rS[0][2 * n + 1][3], Element{})};
      stmatrix_x4(sP + S::TileP::at(row_of_p, chunk_of_p + 2 * n), packed);
    }
    fence_async_proxy();
    __syncthreads();
    wgmma_fence();
    const unsigned long long weights = descriptor(sP, 16);
    const unsigned long long values = descriptor(sK + group * (kColumns / 64) * S::TileK::kPanelBytes, S::TileK::kPanelBytes);
#pragma unroll
    for (int n = 0; n < C::kBlockN / 16; ++n) wgmma_ss_t(rO[0], weights + 2 * n, values + n * (16 * 128 >> 4), 1, Element{});
    wgmma_commit();
    wgmma_wait<0>();
  }
  cp_async_wait<0>();
  __syncthreads();  // the units' place becomes that of the results
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own_row + 8 * r;
    sum[r] += __shfl_xor_sync(kWarp, sum[r], 1);
    sum[r] += __shfl_xor_sync(kWarp, sum[r], 2);
    if (lane % 4 == 0) {
      smem.told[group][row] = sum[r];
      if (group == 0) smem.reference[0][row] = reference[r];
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      *reinterpret_cast<float2*>(&smem.out[0][row][group * kColumns + 8 * n + 2 * (lane % 4)]) =
          float2{rO[0][n][2 * r], rO[0][n][2 * r + 1]};
    }
  }
  __syncthreads();
  if (threadIdx.x < C::kBlockM) smem.sum[0][threadIdx.x] = smem.told[0][threadIdx.x] + smem.told[1][threadIdx.x];
  __syncthreads();
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 1) latent_sm90(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  auto& smem = *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem);
  cupyflash::decode<Config>(p, smem, [&](const auto& e, const auto& g) { cupyflash::compute_latent<Config>(p, e, g, smem); });
}
