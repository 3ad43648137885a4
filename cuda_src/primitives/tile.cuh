// tile.cuh: tiles of 16-bit rows in shared memory: where an element lies, and how a tile is filled from global memory.
//
// Rows of a multiple of 64 elements are swizzled: 16-byte chunk c of row r lies at chunk c ^ (r % 8), so the eight rows that ldmatrix
// reads at once fall into different banks. Rows of other widths are padded by one chunk instead, which makes their pitch odd in chunks.
#pragma once

#include "ptx.cuh"

namespace cupyflash {

template <int kRows, int kWidth>
struct Tile {
  static_assert(kWidth % 16 == 0, "mma.sync reads 16 elements of a row at a time");
  static constexpr int kRowCount = kRows;
  static constexpr bool kSwizzled = kWidth % 64 == 0;
  static constexpr int kChunks = kWidth / 8;  // of 16 bytes
  static constexpr int kPitch = kChunks + (kSwizzled ? 0 : 1);
  static constexpr int kBytes = kRows * kPitch * 16;

  // Byte offset of a chunk.
  __device__ static int at(int row, int chunk) { return (row * kPitch + (kSwizzled ? chunk ^ (row % 8) : chunk)) * 16; }
};

// Scope: block. Queues the copy of rows [0, valid) of `width` elements each, `stride` elements apart, into the tile; the rest of the tile
// becomes zeros.
template <class T, int kThreads, bool kUnaligned, class Element>
__device__ inline void load_tile(char* tile, const Element* global, long long stride, int valid, int width) {
  constexpr int kCopies = T::kRowCount * T::kChunks;
  constexpr int kPasses = (kCopies + kThreads - 1) / kThreads;
  if constexpr (!kUnaligned && kThreads % T::kChunks == 0 && kCopies % kThreads == 0) {
    // Each thread keeps its column, so a pass moves its pointer by a constant and the tail is one comparison.
    constexpr int kRowsAPass = kThreads / T::kChunks;
    const int row = threadIdx.x / T::kChunks, chunk = threadIdx.x % T::kChunks;
    const int bytes = clamp(width - chunk * 8, 0, 8) * 2;
    const Element* source = global + row * stride + (bytes ? chunk * 8 : 0);
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const bool inside = row + n * kRowsAPass < valid;
      cp_async_16(smem_address(tile + T::at(row + n * kRowsAPass, chunk)), inside ? source : global, inside ? bytes : 0);
      source += kRowsAPass * stride;
    }
  } else {
#pragma unroll(kUnaligned ? 1 : kPasses)  // eight loads a copy: unrolled they would take the registers of O
    for (int n = 0; n < kPasses; ++n) {
      const int copy = n * kThreads + threadIdx.x;
      if (kCopies % kThreads != 0 && copy >= kCopies) break;
      const int row = copy / T::kChunks, chunk = copy % T::kChunks;
      const int elements = row < valid ? clamp(width - chunk * 8, 0, 8) : 0;
      const Element* source = global + (elements ? row * stride + chunk * 8 : 0);
      if constexpr (kUnaligned) {
        auto* target = reinterpret_cast<Element*>(tile + T::at(row, chunk));
#pragma unroll
        for (int e = 0; e < 8; ++e) target[e] = e < elements ? source[e] : Element{0};
      } else {
        cp_async_16(smem_address(tile + T::at(row, chunk)), source, elements * 2);
      }
    }
  }
}

}  // namespace cupyflash
