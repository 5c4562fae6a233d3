// A tile of 128 x 128 bytes that is transposed through shared memory: of each of 256 threads 16
// columns of 4 rows, which are 16 bytes of a row, and a word of each of the columns.
#pragma once

#include <cstdint>

#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/quantize_kernels.h"

namespace fsdp::nn::tile {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kTile = 128;
static_assert(kTile == kScalePiece);
inline constexpr int kColumns = 16;
inline constexpr int kRows = 4;
inline constexpr int kAcross = kTile / kColumns;  // threads that have the same rows

__device__ inline int own_column() { return static_cast<int>(threadIdx.x) % kAcross * kColumns; }
__device__ inline int own_row() { return static_cast<int>(threadIdx.x) / kAcross * kRows; }

// Where this thread's numbers are. Columns are there together, or none.
struct Place {
  int64_t row;
  int64_t column;
  int num_rows;  // that exist, 0 if the columns do not
};

// tile_row: of the tile, counted in tiles.
__device__ inline Place own_place(int64_t tile_row, int64_t rows, int64_t columns) {
  Place place{tile_row * kTile + own_row(), static_cast<int64_t>(blockIdx.x) * kTile + own_column(),
              0};
  if (place.column < columns && place.row < rows)
    place.num_rows = rows - place.row < kRows ? static_cast<int>(rows - place.row) : kRows;
  return place;
}

// A tile of bytes by columns, in words of 4 rows. Words are permuted so that neither writing words
// nor reading packs meets a bank of shared memory twice.
struct TurnedTile {
  uint32_t words[kTile][kTile / kRows];

  // The bytes of 4 rows, 4 columns each.
  __device__ void write(int column, const uint32_t (&rows)[kRows]) {
    const uint32_t low_ab = __byte_perm(rows[0], rows[1], 0x5140);
    const uint32_t low_cd = __byte_perm(rows[2], rows[3], 0x5140);
    const uint32_t high_ab = __byte_perm(rows[0], rows[1], 0x7362);
    const uint32_t high_cd = __byte_perm(rows[2], rows[3], 0x7362);
    const int at = own_row() / kRows ^ column / kColumns * 4;
    words[column][at] = __byte_perm(low_ab, low_cd, 0x5410);
    words[column + 1][at] = __byte_perm(low_ab, low_cd, 0x7632);
    words[column + 2][at] = __byte_perm(high_ab, high_cd, 0x5410);
    words[column + 3][at] = __byte_perm(high_ab, high_cd, 0x7632);
  }

  // Of all threads, when all have written. stride: from one column of bytes to the next.
  __device__ void store(uint8_t* to, int64_t columns, int64_t padded_rows, int64_t stride) const {
    constexpr int kPacks = kTile / kPackBytes;  // of a column
    const int64_t row = static_cast<int64_t>(blockIdx.y) * kTile;
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kPacks; i += kThreads) {
      const int in_tile = i / kPacks;
      const int pack = i % kPacks;
      const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile + in_tile;
      if (column >= columns || row + pack * kPackBytes >= padded_rows) continue;
      *reinterpret_cast<uint4*>(to + column * stride + row + pack * kPackBytes) =
          *reinterpret_cast<const uint4*>(&words[in_tile][(pack ^ in_tile / kColumns) * 4]);
    }
  }
};

// --- on the host ---------------------------------------------------------------------------------

inline int64_t padded(int64_t rows) {
  return (rows + kCodeMultiple - 1) / kCodeMultiple * kCodeMultiple;
}

inline dim3 tiles_of(int64_t rows, int64_t columns) {
  return {static_cast<unsigned>((columns + kTile - 1) / kTile),
          static_cast<unsigned>((rows + kTile - 1) / kTile)};
}

}  // namespace fsdp::nn::tile
