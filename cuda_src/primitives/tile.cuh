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

// The addresses at which one lane touches a tile: it starts at a chunk, and moves by whole 8-row groups and by chunks, to a column that its
// start does not reach (whose bits are 0 in the start's). A move is an exclusive or with a constant (the swizzle is linear in it) and an
// offset that fits the instruction, so a loop that is unrolled computes four addresses for a tile instead of one for each load: 200
// instructions fewer a block at D = 128.
template <class T>
struct Cursor {
  unsigned address;

  __device__ Cursor(const char* tile, int row, int chunk) : address(smem_address(tile + T::at(row, chunk))) {}

  // The pair of chunks that ldmatrix reads for 16 elements; rows is a multiple of 8, the tile starts at a multiple of 128 bytes.
  __device__ unsigned at(int rows, int pair) const {
    if constexpr (T::kSwizzled) return (address ^ pair % 4 * 32) + (rows * T::kPitch + pair / 4 * 8) * 16;
    return address + (rows * T::kPitch + pair * 2) * 16;
  }
  __device__ unsigned at_chunk(int rows, int chunk) const {
    if constexpr (T::kSwizzled) return (address ^ chunk % 8 * 16) + (rows * T::kPitch + chunk / 8 * 8) * 16;
    return address + (rows * T::kPitch + chunk) * 16;
  }
};

// How a block copies a tile: eight threads (or what divides the row) copy a row, panel by panel of 128 bytes.
template <class T, int kThreads>
struct Copy {
  static constexpr int kLanes = T::kChunks % 8 == 0 ? 8 : T::kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kPanels = T::kChunks / kLanes;
  static constexpr int kRows = kThreads / kLanes;  // a pass
  static constexpr int kPasses = (T::kRowCount + kRows - 1) / kRows;
  static_assert(kRows % 8 == 0 && (kLanes == 8 || !T::kSwizzled), "from chunk to chunk a thread moves by constants");

  __device__ static bool exists(int row) { return T::kRowCount % kRows == 0 || row < T::kRowCount; }
};

// Scope: block. Fills a tile, element by element, from rows of `width` elements of any type and strides; columns past `width` and, with
// kTail, rows past `valid` become zeros.
template <class Element, class T, int kThreads, bool kTail, class Source>
__device__ inline void load_elements(char* tile, const Source* global, long long stride, long long stride_dim, int valid, int width) {
  using C = Copy<T, kThreads>;
  const int row = threadIdx.x / C::kLanes, lane = threadIdx.x % C::kLanes;
#pragma unroll 1  // eight loads a chunk: unrolled they would take the registers of O
  for (int n = 0; n < C::kPasses; ++n) {
    const int r = row + n * C::kRows;
    if (!C::exists(r)) break;
    const bool inside = !kTail || r < valid;
    const Source* source = global + r * stride;
#pragma unroll 1
    for (int c = 0; c < C::kPanels; ++c) {
      const int chunk = c * C::kLanes + lane;
      auto* target = reinterpret_cast<Element*>(tile + T::at(r, chunk));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const Source x = inside && chunk * 8 + e < width ? source[(chunk * 8 + e) * stride_dim] : Source{0};
        if constexpr (kSame<Element, Source>) {
          target[e] = x;
        } else {
          narrow(widen(x), target[e]);
        }
      }
    }
  }
}

// Scope: block. Queues the copy of a tile from rows of `width` elements, `stride` elements apart; columns past `width` and, with kTail,
// rows past `valid` become zeros. A thread has one pointer that moves by a constant, and without kTail nothing is compared. Aligned rows
// start at multiples of 16 bytes and are a multiple of 8 wide; others are copied at once, element by element.
template <class T, int kThreads, bool kTail, bool kUnaligned, class Element>
__device__ inline void load_tile(char* tile, const Element* global, long long stride, int valid, int width) {
  if constexpr (kUnaligned) {
    load_elements<Element, T, kThreads, kTail>(tile, global, stride, 1, valid, width);
  } else {
    using C = Copy<T, kThreads>;
    const int row = threadIdx.x / C::kLanes, lane = threadIdx.x % C::kLanes;
    const Element* source = global + row * stride + lane * 8;
    const unsigned target = smem_address(tile + T::at(row, lane));
#pragma unroll
    for (int n = 0; n < C::kPasses; ++n) {
      if (!C::exists(row + n * C::kRows)) break;
      const bool inside = !kTail || row + n * C::kRows < valid;
      if (n > 0) source += C::kRows * stride;
#pragma unroll
      for (int c = 0; c < C::kPanels; ++c) {
        const int bytes = inside && (c * C::kLanes + lane) * 8 < width ? 16 : 0;
        cp_async_16(target + (n * C::kRows * T::kPitch + c * C::kLanes) * 16, source + c * C::kLanes * 8, bytes);
      }
    }
  }
}

// Scope: block. Queues the copy of kCount floats; those past `valid`, with kTail, become zeros.
template <int kCount, int kThreads, bool kTail>
__device__ inline void load_vector(float* target, const float* global, int valid) {
#pragma unroll
  for (int n = 0; n < (kCount + kThreads - 1) / kThreads; ++n) {
    const int i = threadIdx.x + n * kThreads;
    if (kCount % kThreads == 0 || i < kCount) cp_async_4(smem_address(target + i), global + i, !kTail || i < valid);
  }
}

// Scope: warp. Writes accumulators (mma.cuh) to a tile, from `row` and `column` on.
template <class C, class T, int kTiles, int kColumns>
__device__ inline void store_tile(char* tile, const float (&r)[kTiles][kColumns / 8][4], int row, int column) {
  static_assert(!T::kSwizzled || (kColumns & (kColumns - 1)) == 0, "a warp's columns start at a multiple of their number");
  using Element = typename C::Element;
  const int lane = threadIdx.x % 32;
  if constexpr (C::kArch >= 90) {
    const Cursor<T> target(tile, row + lane % 16, column / 8 + lane / 16);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        const unsigned packed[4] = {pack(r[m][2 * n][0], r[m][2 * n][1], Element{}), pack(r[m][2 * n][2], r[m][2 * n][3], Element{}),
                                    pack(r[m][2 * n + 1][0], r[m][2 * n + 1][1], Element{}),
                                    pack(r[m][2 * n + 1][2], r[m][2 * n + 1][3], Element{})};
        stmatrix_x4(target.at(16 * m, n), packed);
      }
    }
  } else {
    const Cursor<T> target(tile + lane % 4 * 4, row + lane / 4, column / 8);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        smem_store(target.at_chunk(16 * m, n), pack(r[m][n][0], r[m][n][1], Element{}));
        smem_store(target.at_chunk(16 * m + 8, n), pack(r[m][n][2], r[m][n][3], Element{}));
      }
    }
  }
}

}  // namespace cupyflash
