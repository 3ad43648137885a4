// mma.cuh: tile x tile by mma.sync m16n8k16. A warp owns kTiles x 16 rows; its accumulators are [16-row tile][8-column tile][4], where
// element e of lane l is row l / 4 + (e >= 2 ? 8 : 0), column 2 (l % 4) + e % 2.
#pragma once

#include "tile.cuh"

namespace cupyflash {

// S (rows of the warp x kKeys) = Q K^T; Q and K lie in shared memory, row-major, kWidth wide. `row` is the warp's first row of Q.
template <class Element, class TileQ, class TileK, int kTiles, int kKeys, int kWidth>
__device__ inline void multiply_qk(float (&rS)[kTiles][kKeys / 8][4], const char* sQ, const char* sK, int row) {
  const int lane = threadIdx.x % 32;
  const Reader<TileQ> q(sQ, row + lane % 16, lane / 16);
  const Reader<TileK> k_reader(sK, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) rS[m][n][e] = 0;
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    unsigned rQ[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) ldmatrix_x4(rQ[m], q.at(16 * m, k));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      unsigned rK[4];  // two tiles of 8 keys, two chunks of 8 elements each
      ldmatrix_x4(rK, k_reader.at(16 * n, k));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        mma_m16n8k16(rS[m][2 * n], rQ[m], rK[0], rK[1], Element{});
        mma_m16n8k16(rS[m][2 * n + 1], rQ[m], rK[2], rK[3], Element{});
      }
    }
  }
}

// O (rows of the warp x kWidth) += P V; P is in registers in the layout of the accumulators of S, V in shared memory, row-major.
template <class Element, class TileV, int kTiles, int kKeys, int kWidth>
__device__ inline void multiply_pv(float (&rO)[kTiles][kWidth / 8][4], const float (&rP)[kTiles][kKeys / 8][4], const char* sV) {
  const Reader<TileV> v(sV, threadIdx.x % 16, threadIdx.x % 32 / 16);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    unsigned a[kTiles][4];  // the accumulators of two 8-key tiles are, packed, the A operand of 16 keys
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      a[m][0] = pack(rP[m][2 * k][0], rP[m][2 * k][1], Element{});
      a[m][1] = pack(rP[m][2 * k][2], rP[m][2 * k][3], Element{});
      a[m][2] = pack(rP[m][2 * k + 1][0], rP[m][2 * k + 1][1], Element{});
      a[m][3] = pack(rP[m][2 * k + 1][2], rP[m][2 * k + 1][3], Element{});
    }
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      unsigned rV[4];
      ldmatrix_x4_trans(rV, v.at(16 * k, n));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        mma_m16n8k16(rO[m][2 * n], a[m], rV[0], rV[1], Element{});
        mma_m16n8k16(rO[m][2 * n + 1], a[m], rV[2], rV[3], Element{});
      }
    }
  }
}

}  // namespace cupyflash
