// bytes.cuh: as mma.cuh, of K and V whose numbers have 8 bits. In registers they become fp16, which holds all of them, and Q and P are
// fp16. A tile of bytes is one of half as many 16-bit elements, so ldmatrix gives a lane four neighbours, or two and the two below them.
#pragma once

#include "mma.cuh"

namespace cupyflash {

// Four numbers as two registers of fp16: the first two and the last two, or with kAlternate the first and the third, and the others.
template <class C, bool kAlternate>
__device__ inline void widen_bytes(unsigned (&pairs)[2], unsigned x, signed char) {
  x ^= 0x80808080u;  // + 128; behind the byte 0x64 it is that number + 1024
  pairs[0] = fma_pair(__byte_perm(x, 0x64646464u, kAlternate ? 0x4240 : 0x4140), 0x3c003c00u, 0xe480e480u, Half{});  // 1 x - 1152
  pairs[1] = fma_pair(__byte_perm(x, 0x64646464u, kAlternate ? 0x4341 : 0x4342), 0x3c003c00u, 0xe480e480u, Half{});
}
template <class C, bool kAlternate>
__device__ inline void widen_bytes(unsigned (&pairs)[2], unsigned x, E4M3) {
  if constexpr (kAlternate) x = __byte_perm(x, 0, 0x3120);
  if constexpr (C::kArch >= 89) {
    widen_e4m3(pairs, x);
  } else {  // as `widen` in types.cuh
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const unsigned v = __byte_perm(x, 0, n == 0 ? 0x1404 : 0x3424), code = v & 0x7f007f00u;
      pairs[n] = fma_pair((v & 0x80008000u) | code >> 1 | ((code + 0x01000100u) & 0x80008000u) >> 1, 0x5c005c00u, 0, Half{});  // 256 x
    }
  }
}

// Where an element of a row of Q has to lie for multiply_qk_bytes: of each 16 the four that a lane has of a key are those that it has of Q.
__device__ inline int place_in_row(int d) { return d / 16 * 16 + d % 16 / 4 * 2 + d % 4 / 2 * 8 + d % 2; }

// S (16 rows x kKeys) = Q K^T.
template <class C, class TileQ, class TileK, int kKeys, int kWidth>
__device__ inline void multiply_qk_bytes(float (&rS)[1][kKeys / 8][4], const char* sQ, const char* sK) {
  const int lane = threadIdx.x % 32;
  const Cursor<TileQ> q(sQ, lane % 16, lane / 16);
  const Cursor<TileK> k_cursor(sK, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) rS[0][n][0] = rS[0][n][1] = rS[0][n][2] = rS[0][n][3] = 0;
#pragma unroll
  for (int k = 0; k < kWidth / 32; ++k) {
    unsigned rQ[2][4];
    ldmatrix_x4(rQ[0], q.at(0, 2 * k));
    ldmatrix_x4(rQ[1], q.at(0, 2 * k + 1));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      unsigned rK[4];  // two tiles of 8 keys, two chunks of 16 elements each
      ldmatrix_x4(rK, k_cursor.at(16 * n, k));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        unsigned pairs[2];
        widen_bytes<C, false>(pairs, rK[m], typename C::Cached{});
        mma_m16n8k16(rS[0][2 * n + m / 2], rQ[m % 2], pairs[0], pairs[1], Half{});
      }
    }
  }
}

// O (16 rows x kWidth) += P V. Of each 16 columns of O the first tile of 8 has the even ones, the second the odd ones.
template <class C, class TileV, int kKeys, int kWidth>
__device__ inline void multiply_pv_bytes(float (&rO)[1][kWidth / 8][4], const float (&rP)[1][kKeys / 8][4], const char* sV) {
  const Cursor<TileV> v(sV, threadIdx.x % 16, threadIdx.x % 32 / 16);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    unsigned a[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) a[m] = pack(rP[0][2 * k + m / 2][m % 2 * 2], rP[0][2 * k + m / 2][m % 2 * 2 + 1], Half{});
#pragma unroll
    for (int n = 0; n < kWidth / 32; ++n) {
      unsigned rV[4];
      ldmatrix_x4_trans(rV, v.at(16 * k, n));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        unsigned low[2], high[2];  // of keys 0 to 7 and 8 to 15
        widen_bytes<C, true>(low, rV[2 * m], typename C::Cached{});
        widen_bytes<C, true>(high, rV[2 * m + 1], typename C::Cached{});
        mma_m16n8k16(rO[0][4 * n + 2 * m], a, low[0], high[0], Half{});
        mma_m16n8k16(rO[0][4 * n + 2 * m + 1], a, low[1], high[1], Half{});
      }
    }
  }
}

}  // namespace cupyflash
