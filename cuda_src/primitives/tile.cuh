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
  static constexpr bool kSwizzled = kWidth % 64 == 0;
  static constexpr int kChunks = kWidth / 8;  // of 16 bytes
  static constexpr int kPitch = kChunks + (kSwizzled ? 0 : 1);
  static constexpr int kBytes = kRows * kPitch * 16;

  // Byte offset of a chunk.
  __device__ static int at(int row, int chunk) { return (row * kPitch + (kSwizzled ? chunk ^ (row % 8) : chunk)) * 16; }
};

// Scope: block. Queues the copy of rows [0, valid) of `width` elements each into the tile; the rest of the tile becomes zeros.
// row_at(r) gives the address of row r in global memory and is asked for r < valid only.
template <class T, int kRows, int kThreads, bool kUnaligned, class Element, class RowAt>
__device__ inline void load_tile(char* tile, int valid, int width, RowAt row_at) {
  constexpr int kCopies = kRows * T::kChunks;
#pragma unroll
  for (int n = 0; n < (kCopies + kThreads - 1) / kThreads; ++n) {
    const int copy = n * kThreads + threadIdx.x;
    if (kCopies % kThreads != 0 && copy >= kCopies) break;
    const int row = copy / T::kChunks, chunk = copy % T::kChunks;
    const int elements = row < valid ? clamp(width - chunk * 8, 0, 8) : 0;
    const Element* global = static_cast<const Element*>(row_at(row < valid ? row : 0));
    if constexpr (kUnaligned) {
      Element values[8];
      for (int e = 0; e < 8; ++e) values[e] = e < elements ? global[chunk * 8 + e] : Element{0};
      auto* words = reinterpret_cast<const unsigned short*>(values);
      auto* target = reinterpret_cast<unsigned short*>(tile + T::at(row, chunk));
      for (int e = 0; e < 8; ++e) target[e] = words[e];
    } else {
      cp_async_16(smem_address(tile + T::at(row, chunk)), elements ? global + chunk * 8 : global, elements * 2);
    }
  }
}

}  // namespace cupyflash
