// mma.cuh: tile x tile by mma.sync m16n8k16, of the forward and of the backward. A warp owns kTiles x 16 rows; its accumulators are [16-row
// tile][8-column tile][4], where element e of lane l is row l / 4 + (e >= 2 ? 8 : 0), column 2 (l % 4) + e % 2.
#pragma once

#include "tile.cuh"

namespace cupyflash {

// S (rows of the warp x kKeys) = start + Q K^T; Q and K lie in shared memory, row-major, kWidth wide. `row` is the warp's first row of Q,
// `key` its first of K; `start` has a value for each row of a lane.
template <class Element, class TileQ, class TileK, int kTiles, int kKeys, int kWidth>
__device__ inline void multiply_qk(float (&rS)[kTiles][kKeys / 8][4], const char* sQ, const char* sK, int row, int key,
                                   const float (&start)[kTiles][2]) {
  const int lane = threadIdx.x % 32;
  const Cursor<TileQ> q(sQ, row + lane % 16, lane / 16);
  const Cursor<TileK> k_cursor(sK, key + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    unsigned rQ[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) ldmatrix_x4(rQ[m], q.at(16 * m, k));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      unsigned rK[4];  // two tiles of 8 keys, two chunks of 8 elements each
      ldmatrix_x4(rK, k_cursor.at(16 * n, k));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (k == 0) {
          mma_m16n8k16(rS[m][2 * n], rQ[m], rK[0], rK[1], start[m][0], start[m][1], Element{});
          mma_m16n8k16(rS[m][2 * n + 1], rQ[m], rK[2], rK[3], start[m][0], start[m][1], Element{});
        } else {
          mma_m16n8k16(rS[m][2 * n], rQ[m], rK[0], rK[1], Element{});
          mma_m16n8k16(rS[m][2 * n + 1], rQ[m], rK[2], rK[3], Element{});
        }
      }
    }
  }
}

// S (rows of the warp x kKeys) = Q K^T.
template <class Element, class TileQ, class TileK, int kTiles, int kKeys, int kWidth>
__device__ inline void multiply_qk(float (&rS)[kTiles][kKeys / 8][4], const char* sQ, const char* sK, int row, int key = 0) {
  const float zero[kTiles][2] = {};
  multiply_qk<Element, TileQ, TileK, kTiles, kKeys, kWidth>(rS, sQ, sK, row, key, zero);
}

// O (rows of the warp x kWidth) += P V; P is in registers in the layout of the accumulators of S, V in shared memory, row-major.
template <class Element, class TileV, int kTiles, int kKeys, int kWidth>
__device__ inline void multiply_pv(float (&rO)[kTiles][kWidth / 8][4], const float (&rP)[kTiles][kKeys / 8][4], const char* sV) {
  const Cursor<TileV> v(sV, threadIdx.x % 16, threadIdx.x % 32 / 16);
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

// The columns of a product that is kWidth wide, dealt out to kWarps warps 16 at a time, in turn: warp w has the groups w, w + kWarps, ...
// So whatever the width, a warp's place and its moves are different bits of an address.
template <int kWidth, int kWarps>
struct Dealt {
  static constexpr int kCount = (kWidth / 16 + kWarps - 1) / kWarps;  // groups of the first warp; others may have one less

  __device__ static bool exists(int warp, int n) { return (n + 1) * kWarps <= kWidth / 16 || warp + n * kWarps < kWidth / 16; }
  // The first column of an 8-column tile of the accumulators.
  __device__ static int column(int warp, int tile) { return 16 * (warp + tile / 2 * kWarps) + tile % 2 * 8; }
};

// C (kTiles x 16 rows x the warp's share of kWidth columns) += A B, over kDepth; A and B in shared memory, row-major. With kTransposed the
// tile of A is A^T: its rows are the depth, its columns the rows of C.
template <class Element, class TileA, class TileB, bool kTransposed, int kTiles, int kDepth, int kWidth, int kWarps>
__device__ inline void add_ab(float (&rC)[kTiles][2 * Dealt<kWidth, kWarps>::kCount][4], const char* sA, const char* sB, int row,
                              int warp) {
  static_assert(!(kTransposed && TileA::kSwizzled) || (kTiles & (kTiles - 1)) == 0, "a warp's columns start at a multiple of their number");
  using Columns = Dealt<kWidth, kWarps>;
  const int lane = threadIdx.x % 32;
  const Cursor<TileA> a =
      kTransposed ? Cursor<TileA>(sA, lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2) : Cursor<TileA>(sA, row + lane % 16, lane / 16);
  const Cursor<TileB> b(sB, lane % 16, 2 * warp + lane / 16);
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    unsigned rA[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (kTransposed) {
        ldmatrix_x4_trans(rA[m], a.at(16 * k, m));
      } else {
        ldmatrix_x4(rA[m], a.at(16 * m, k));
      }
    }
#pragma unroll
    for (int n = 0; n < Columns::kCount; ++n) {
      if (!Columns::exists(warp, n)) break;
      unsigned rB[4];  // two tiles of 8 columns, 16 of the depth
      ldmatrix_x4_trans(rB, b.at(16 * k, n * kWarps));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        mma_m16n8k16(rC[m][2 * n], rA[m], rB[0], rB[1], Element{});
        mma_m16n8k16(rC[m][2 * n + 1], rA[m], rB[2], rB[3], Element{});
      }
    }
  }
}

}  // namespace cupyflash
