// latent_sm90.cu: few query rows over latent keys, whose first columns are the values, for fp16 and bf16 on sm_90a. Read it after
// decode.cu.
//
// Algorithm  The absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): all query heads read one key
//            head of latent and rotated columns, and V is its latent ones. So a key is read once, for both products.
// Work       Shared out as in decode.cu, and merged by latent_merge.cu; a tile is 64 rows.
// Threads    Warpgroup 0 copies, two warps a unit. The others have half of the columns of O each, since none has registers for all of them,
//            and take turns at the units: S and P of a unit are of one, O += P V is of both.
// Turns      References pass from unit to unit: who has the next one takes those of the unit before, with its P. S and the largest scores
//            need neither, and come first. Who leads waits for the other's P when it has added its own unit: not later, since both
//            units' room is needed for the next two.
// Smem       sQ; two units of keys, in whose place O lies at the end. P of a unit lies where its keys have columns that are no values, once
//            S is done. What a unit of 64 keys takes at D = 576 and 512: 72 kB of memory, which two tiles of 64 heads read, 1,800
//            clocks of an SM's share of 4.7 TB/s; 2,200 of the tensor cores.
// Way out    As decode.cu.
#include "../primitives/parts.cuh"
#include "../primitives/tma.cuh"
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
    alignas(1024) char keys[2][TileK::kBytes];
    float out[1][C::kBlockM][kPitch];
  };
  float reference[1][C::kBlockM], sum[1][C::kBlockM];
  float told[2][C::kBlockM], sums[2][C::kBlockM];  // of each warpgroup: references with its last unit; its weights
  alignas(8) unsigned long long full[2], empty[2];
  Shared<C> shared;
};

// The keys of a segment as a warp copies them, half of a unit at a time; eight lanes a key.
template <class C>
struct LatentKeys {
  using Element = typename C::Element;
  static constexpr int kOwn = C::kBlockN / 2;
  static_assert(kOwn == 32, "a lane for each key");
  const ForwardParams& p;
  const Extent<C>& e;
  const Segment<C>& g;
  int page;  // of the lane's key of the next unit, as the table has it

  __device__ LatentKeys(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, int unit) : p(p), e(e), g(g) { look_up(unit); }
  __device__ int first_key(int unit) const { return unit * C::kBlockN + threadIdx.x / 32 % 2 * kOwn; }
  __device__ bool exists(int key) const { return key >= e.keys.first && key < e.keys.last; }
  __device__ void look_up(int unit) {
    const int key = first_key(unit) + threadIdx.x % 32;
    page = C::kPaged && unit < g.last_unit && exists(key) ? page_of(p, g.b, key) : 0;
  }
  // The warp's keys of a unit; its next one is the one after the next.
  __device__ void load(int unit, char* tile) {
    using T = typename Smem<C>::TileK;
    const int lane = threadIdx.x % 32, key = first_key(unit), own = key + lane;
    const auto* from = static_cast<const Element*>(p.k) + g.h_kv * p.k_stride_head;
    if constexpr (C::kPaged) {
      from += clamp(page, 0, p.num_pages - 1) * p.k_stride_batch + slot_in_page(p, own) * p.k_stride_seq;
      look_up(unit + 2);
    } else {
      from += (C::kPacked ? 0 : g.b) * p.k_stride_batch + (keys_before<C>(e.s) + own) * p.k_stride_seq;
    }
#pragma unroll 2
    for (int n = 0; n < kOwn / 4; ++n) {
      const int row = 4 * n + lane / 8;
      const auto* const begin = reinterpret_cast<const Element*>(__shfl_sync(kWarp, reinterpret_cast<unsigned long long>(from), row));
      const bool there = exists(key + row);
#pragma unroll
      for (int panel = 0; panel < T::kCount; ++panel) {
        const int chunk = 8 * panel + lane % 8;
        cp_async_16(smem_address(tile + T::at(threadIdx.x / 32 % 2 * kOwn + row, chunk)), begin + 8 * chunk,
                    there && 8 * chunk < p.head_dim ? 16 : 0);
      }
    }
    cp_async_commit();
  }
};

// Scope: the warpgroup that copies. `done` counts units since the kernel began, whose parity says in which buffer and whose turn one is.
template <class C>
__device__ inline void copy_units(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem, int done) {
  const int buffer = threadIdx.x / 64, first = (buffer ^ done) & 1;
  LatentKeys<C> keys(p, e, g, g.unit + first);
#pragma unroll 1
  for (int i = first; i < g.last_unit - g.unit; i += 2) {
    mbarrier_wait(smem_address(&smem.empty[buffer]), (done + i) / 2 % 2 ^ 1);
    keys.load(g.unit + i, smem.keys[buffer]);
    cp_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
    release(smem.full[buffer]);
  }
}

// Scope: the warpgroups that multiply. All units of a segment; O, references and sums go to shared memory.
template <class C>
__device__ inline void multiply_units(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem, int done) {
  using Element = typename C::Element;
  using S = Smem<C>;
  constexpr int kColumns = C::kHeadDimV / 2, kRows = C::kBlockM, kKeys = C::kBlockN;
  constexpr int kSpare = C::kHeadDimV / 64 * S::TileK::kPanelBytes;  // where P lies in a unit
  static_assert(kRows == 64 && kKeys == 64 && C::kHeadDim >= C::kHeadDimV + 64 && kColumns % 64 == 0);
  const int own = uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16;
  const int row = first_row + lane / 4, count = uniform(g.last_unit - g.unit);  // and row + 8
  const float scale_log2 = kFused<C> ? fabsf(p.softmax_scale_log2) : 1.0f;
  float rO[1][kColumns / 8][4] = {};
  float reference[2] = {-infinity(0.0f), -infinity(0.0f)}, sum[2] = {}, rescale[2];
  const LaneRows<C> rows(p, e, g, first_row);

  auto values_in = [&](int buffer) { return smem_address(smem.keys[buffer]) + own * (kColumns / 64) * S::TileK::kPanelBytes; };
  auto follow = [&](int r, float to) {
    rescale[r] = reference[r] == to ? 1.0f : ex2(reference[r] - to);  // also where both are -inf
    reference[r] = to;
    sum[r] *= rescale[r];
  };
  auto rescale_o = [&] {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) rO[0][n][x] *= rescale[x / 2];
    }
  };
  // Queues the product with the weights of the other's unit, when they are there.
  auto multiply_other = [&] {
    const int other = own ^ 1;
    named_barrier_sync(1 + other, 256);
#pragma unroll
    for (int r = 0; r < 2; ++r) follow(r, smem.told[other][row + 8 * r]);
    if (__any_sync(kWarp, rescale[0] != 1.0f || rescale[1] != 1.0f)) rescale_o();
    const unsigned weights = descriptor(smem_address(smem.keys[other]) + kSpare, 16);
    const unsigned values = descriptor(values_in(other), kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) wgmma_ss_t(rO[0], whole(weights + 2 * n), whole(values + n * (16 * 128 >> 4)), 1, Element{});
    wgmma_commit();
  };

  const int first = uniform((own ^ done) & 1);
  const bool leads = first == 0;
#pragma unroll 1
  for (int i = first; i < count; i += 2) {
    const unsigned sQ = uniform(smem_address(smem.q)), sK = uniform(smem_address(smem.keys[own]));
    float rS[1][kKeys / 8][4], top[2];
    mbarrier_wait(smem_address(&smem.full[own]), (done + i) / 2 % 2);
    wgmma_fence();
    issue_qk<Element, kRows, kKeys, C::kHeadDim>(rS, sQ, sK);
    wgmma_commit();
    wgmma_wait<0>();
    score_keys<C>(p, e, rows, nullptr, (g.unit + i) * kKeys, rS, top);
    if (leads) {
      named_barrier_sync(4 + own, 128);  // as in there: P goes where all warps have read keys
    } else {
      multiply_other();
    }
    const bool moves = __any_sync(kWarp, top[0] > reference[0] + kGrowth || top[1] > reference[1] + kGrowth);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      follow(r, moves ? fmaxf(reference[r], top[r]) : reference[r]);
      const float from = reference[r] == -infinity(0.0f) ? 0.0f : reference[r];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = rS[0][n][2 * r + c];
          score = ex2(fmaf(score, scale_log2, -from));
          sum[r] += score;
        }
      }
      if (lane % 4 == 0) smem.told[own][row + 8 * r] = reference[r];
    }
    unsigned rP[kKeys / 16][4];
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      rP[n][0] = pack(rS[0][2 * n][0], rS[0][2 * n][1], Element{});
      rP[n][1] = pack(rS[0][2 * n][2], rS[0][2 * n][3], Element{});
      rP[n][2] = pack(rS[0][2 * n + 1][0], rS[0][2 * n + 1][1], Element{});
      rP[n][3] = pack(rS[0][2 * n + 1][2], rS[0][2 * n + 1][3], Element{});
      stmatrix_x4(sK + kSpare + S::TileP::at(first_row + lane % 16, lane / 16 + 2 * n), rP[n]);
    }
    fence_async_proxy();
    named_barrier_arrive(1 + own, 256);
    wgmma_wait<0>();
    if (!leads) release(smem.empty[own ^ 1]);
    if (moves) rescale_o();
    wgmma_fence();
    issue_pv<Element, kKeys, kColumns>(rO, rP, values_in(own), 1);
    wgmma_commit();
    wgmma_wait<0>();
    release(smem.empty[own]);
    if (leads && i + 1 < count) {
      multiply_other();
      wgmma_wait<0>();
      release(smem.empty[own ^ 1]);
    }
  }
  if (!leads && count % 2 != 0) {
    multiply_other();
    wgmma_wait<0>();
    release(smem.empty[own ^ 1]);
  }
  named_barrier_sync(3, 256);  // the units' place becomes that of the results
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(kWarp, sum[r], 1);
    sum[r] += __shfl_xor_sync(kWarp, sum[r], 2);
    if (lane % 4 == 0) {
      smem.sums[own][row + 8 * r] = sum[r];
      if (own == 0) smem.reference[0][row + 8 * r] = reference[r];
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      *reinterpret_cast<float2*>(&smem.out[0][row + 8 * r][own * kColumns + 8 * n + 2 * (lane % 4)]) =
          float2{rO[0][n][2 * r], rO[0][n][2 * r + 1]};
    }
  }
}

// Scope: block. All keys of a segment.
template <class C>
__device__ inline void compute_latent(const ForwardParams& p, const Extent<C>& e, const Segment<C>& g, Smem<C>& smem, int& done) {
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();  // the rows have arrived
  if (threadIdx.x < 128) {
    registers_give<104>();  // what is known of the segment, too, lives through here: with 88 and 208 both loops spilled
    copy_units<C>(p, e, g, smem, done);
    named_barrier_sync(6, 384);  // where there is nothing to copy, it would take back what the others have yet to get
    registers_take<168>();
  } else {
    registers_take<200>();
    multiply_units<C>(p, e, g, smem, done);
    registers_give<168>();
    named_barrier_arrive(6, 384);
  }
  done += g.last_unit - g.unit;
  __syncthreads();
  if (threadIdx.x < C::kBlockM) smem.sum[0][threadIdx.x] = smem.sums[0][threadIdx.x] + smem.sums[1][threadIdx.x];
  __syncthreads();
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 1) latent_sm90(const __grid_constant__ cupyflash::ForwardParams p) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  auto& smem = *reinterpret_cast<cupyflash::Smem<Config>*>(dynamic_smem);
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) {
      cupyflash::mbarrier_init(cupyflash::smem_address(&smem.full[n]), 2);   // the warps that copy
      cupyflash::mbarrier_init(cupyflash::smem_address(&smem.empty[n]), 8);  // those that multiply
    }
    cupyflash::mbarrier_init_fence();
  }
  __syncthreads();
  int done = 0;
  cupyflash::decode<Config>(p, smem, [&](const auto& e, const auto& g) { cupyflash::compute_latent<Config>(p, e, g, smem, done); });
}
