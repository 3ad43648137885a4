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

// The addresses at which one lane of ldmatrix reads a tile: it starts at a chunk, and moves by whole 8-row groups and pairs of chunks.
// A move is an exclusive or with a constant (the swizzle is linear in it) and an offset that fits the instruction, so a loop that is
// unrolled computes four addresses for a tile instead of one for each load: 200 instructions fewer a block at D = 128.
template <class T>
struct Reader {
  unsigned address;

  __device__ Reader(const char* tile, int row, int chunk) : address(smem_address(tile + T::at(row, chunk))) {}

  __device__ unsigned at(int rows, int pair) const {  // rows is a multiple of 8; the tile starts at a multiple of 128 bytes
    if constexpr (T::kSwizzled) return (address ^ pair % 4 * 32) + (rows * T::kPitch + pair / 4 * 8) * 16;
    return address + (rows * T::kPitch + pair * 2) * 16;
  }
};

// Scope: block. Queues the copy of a tile from rows of `width` elements, `stride` elements apart; columns past `width` and, with kTail,
// rows past `valid` become zeros. Eight threads (or what divides the row) copy a row, panel by panel of 128 bytes: each has one pointer
// that moves by a constant, and without kTail nothing is compared. Aligned rows start at multiples of 16 bytes and are a multiple of 8
// wide.
template <class T, int kThreads, bool kTail, bool kUnaligned, class Element>
__device__ inline void load_tile(char* tile, const Element* global, long long stride, int valid, int width) {
  constexpr int kLanes = T::kChunks % 8 == 0 ? 8 : T::kChunks % 4 == 0 ? 4 : 2;
  constexpr int kRowsAPass = kThreads / kLanes;
  constexpr int kPasses = (T::kRowCount + kRowsAPass - 1) / kRowsAPass;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
#pragma unroll(kUnaligned ? 1 : kPasses)  // eight loads a chunk: unrolled they would take the registers of O
  for (int n = 0; n < kPasses; ++n) {
    const int r = row + n * kRowsAPass;
    if (T::kRowCount % kRowsAPass != 0 && r >= T::kRowCount) break;
    const bool inside = !kTail || r < valid;
    const Element* source = global + r * stride;
#pragma unroll(kUnaligned ? 1 : T::kChunks / kLanes)
    for (int c = 0; c < T::kChunks / kLanes; ++c) {
      const int chunk = c * kLanes + lane;
      if constexpr (kUnaligned) {
        auto* target = reinterpret_cast<Element*>(tile + T::at(r, chunk));
#pragma unroll
        for (int e = 0; e < 8; ++e) target[e] = inside && chunk * 8 + e < width ? source[chunk * 8 + e] : Element{0};
      } else {
        cp_async_16(smem_address(tile + T::at(r, chunk)), source + chunk * 8, inside && chunk * 8 < width ? 16 : 0);
      }
    }
  }
}

}  // namespace cupyflash
