// Matrices to codes by rows and transposed, from one read of tiles of 128 x 128 numbers. Pieces
// have their scales within a tile; those of rows, columns and the matrix need a pass for the
// largest magnitudes first.
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/code_words.cuh"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

// --- tiles ---------------------------------------------------------------------------------------

// A tile of 128 x 128 bytes is transposed through shared memory: of each of 256 threads 16 columns
// of 4 rows, which are 16 bytes of a row, and a word of each of the columns.
constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kTile = 128;
static_assert(kTile == kScalePiece);
constexpr int kColumns = 16;
constexpr int kRows = 4;
constexpr int kAcross = kTile / kColumns;  // threads that have the same rows

__device__ int own_column() { return static_cast<int>(threadIdx.x) % kAcross * kColumns; }
__device__ int own_row() { return static_cast<int>(threadIdx.x) / kAcross * kRows; }

// Where this thread's numbers are. Columns are there together, or none.
struct Place {
  int64_t row;
  int64_t column;
  int num_rows;  // that exist, 0 if the columns do not
};

// tile_row: of the tile, counted in tiles.
__device__ Place own_place(int64_t tile_row, int64_t rows, int64_t columns) {
  Place place{tile_row * kTile + own_row(), static_cast<int64_t>(blockIdx.x) * kTile + own_column(),
              0};
  if (place.column < columns && place.row < rows)
    place.num_rows = rows - place.row < kRows ? static_cast<int>(rows - place.row) : kRows;
  return place;
}

// A tile of bytes by columns, in words of 4 rows. Words are permuted so that neither writing words
// nor reading packs meets a bank of shared memory twice.
struct TransposedTile {
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

  // Called by all threads when all have written. stride: from one column of bytes to the next.
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

int64_t padded(int64_t rows) { return (rows + kCodeMultiple - 1) / kCodeMultiple * kCodeMultiple; }

dim3 tiles_of(int64_t rows, int64_t columns) {
  return {static_cast<unsigned>((columns + kTile - 1) / kTile),
          static_cast<unsigned>((rows + kTile - 1) / kTile)};
}

// --- numbers -------------------------------------------------------------------------------------

struct Tiles {
  int64_t rows;
  int64_t columns;
  int64_t padded_rows;
  CodesMemory by_rows;
  int64_t by_rows_stride;
  CodesMemory by_columns;
  const float* column_multipliers;
  const float* row_multipliers;
  uint32_t* row_amaxes;  // kMatrix: the one
  uint32_t* column_amaxes;
};

// A thread's numbers; zeros where there are none.
template <typename T>
struct Part {
  static constexpr int kCount = kPackCount<T>;
  RawPack<T> packs[kRows][kColumns / kCount];

  __device__ void load(const T* numbers, const Place& place, int64_t stride) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int k = 0; k < kColumns / kCount; ++k)
        packs[row][k] =
            row < place.num_rows
                ? load_raw_pack(numbers + (place.row + row) * stride + place.column + k * kCount)
                : RawPack<T>{};
    }
  }

  __device__ float number(int row, int column) const {
    return widened(packs[row][column / kCount]).of[column % kCount];
  }
};

__device__ void load_row_multipliers(const Tiles& t, const Place& place, float (&to)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    to[i] = t.row_multipliers != nullptr && i < place.num_rows ? t.row_multipliers[place.row + i]
                                                               : 1.0f;
}

__device__ void load_column_multipliers(const Tiles& t, const Place& place, float (&to)[kColumns]) {
  const bool has_some = t.column_multipliers != nullptr && place.column < t.columns;
#pragma unroll
  for (int i = 0; i < kColumns; i += kVector) {
    Floats<kVector> by{};
    if (has_some) by = load_pack<kVector>(t.column_multipliers + place.column + i);
#pragma unroll
    for (int k = 0; k < kVector; ++k) to[i + k] = has_some ? by.of[k] : 1.0f;
  }
}

// The magnitude of a product, as bits.
__device__ uint32_t product_bits(float number, float multiplier) {
  return __float_as_uint(fabsf(number) * fabsf(multiplier));
}

template <typename T>
__device__ void row_maxes(const Part<T>& part, const float (&multipliers)[kColumns],
                          uint32_t (&most)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    most[row] = 0;
#pragma unroll
    for (int k = 0; k < kColumns; k += 2)
      most[row] = __vimax3_u32(most[row], product_bits(part.number(row, k), multipliers[k]),
                               product_bits(part.number(row, k + 1), multipliers[k + 1]));
#pragma unroll
    for (int step = kAcross / 2; step > 0; step /= 2)
      most[row] = max(most[row], __shfl_xor_sync(~0u, most[row], step));
  }
}

// Those of a thread's rows and of what came before.
template <typename T>
__device__ void add_column_maxes(const Part<T>& part, const float (&multipliers)[kRows],
                                 uint32_t (&most)[kColumns]) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k)
#pragma unroll
    for (int row = 0; row < kRows; row += 2)
      most[k] = __vimax3_u32(most[k], product_bits(part.number(row, k), multipliers[row]),
                             product_bits(part.number(row + 1, k), multipliers[row + 1]));
}

// Joins the maxima of all threads of a block: they are in shared memory when this returns.
__device__ void combine_column_maxes(const uint32_t (&most)[kColumns], uint32_t (&tile)[kTile]) {
  if (threadIdx.x < kTile) tile[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    uint32_t of_warp = most[k];
#pragma unroll
    for (int step = kAcross; step < kWarp; step *= 2)
      of_warp = max(of_warp, __shfl_xor_sync(~0u, of_warp, step));
    if (threadIdx.x % kWarp < kAcross) atomicMax(&tile[own_column() + k], of_warp);
  }
  __syncthreads();
}

// Maxima do not depend on the order of the atomics.
template <typename T>
__global__ void __launch_bounds__(kThreads) matrix_amax_kernel(const T* numbers, Tiles t) {
  Part<T> part;
  part.load(numbers, own_place(blockIdx.y, t.rows, t.columns), t.columns);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i)
    most = max(most, magnitude_bits(part.number(i / kColumns, i % kColumns)));
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
  if (threadIdx.x % kWarp == 0) atomicMax(t.row_amaxes, most);
}

// A block goes down through so many tiles: columns are combined once for all of them.
constexpr int kTilesDown = 4;

template <typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 1)
    row_amax_kernel(const T* numbers, Tiles t) {
  uint32_t column_most[kColumns] = {};
  for (int tile = 0; tile < kTilesDown; ++tile) {
    const Place place = own_place(int64_t{blockIdx.y} * kTilesDown + tile, t.rows, t.columns);
    Part<T> part;
    part.load(numbers, place, t.columns);
    if (t.by_rows.codes != nullptr) {
      float multipliers[kColumns];
      load_column_multipliers(t, place, multipliers);
      uint32_t most[kRows];
      row_maxes(part, multipliers, most);
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (own_column() == 0 && row < place.num_rows)
          atomicMax(t.row_amaxes + place.row + row, most[row]);
    }
    float multipliers[kRows];
    load_row_multipliers(t, place, multipliers);
    add_column_maxes(part, multipliers, column_most);
  }
  if (t.by_columns.codes == nullptr) return;
  __shared__ uint32_t combined[kTile];
  combine_column_maxes(column_most, combined);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x;
  if (threadIdx.x < kTile && column < t.columns)
    atomicMax(t.column_amaxes + column, combined[threadIdx.x]);
}

template <typename T, ScaleBlock kBlock>
__device__ void write_rows(const Part<T>& part, const Place& place, const Tiles& t) {
  float multipliers[kColumns];
  load_column_multipliers(t, place, multipliers);
  uint32_t most[kRows] = {};
  if constexpr (kBlock == ScaleBlock::kPiece) row_maxes(part, multipliers, most);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= place.num_rows) continue;
    const int64_t at = place.row + row;
    if constexpr (kBlock == ScaleBlock::kRow) most[row] = t.row_amaxes[at];
    if constexpr (kBlock == ScaleBlock::kMatrix) most[row] = t.row_amaxes[0];
    const float factor = factor_of(most[row]);
    Pack<uint32_t, kColumns / kVector> words;
#pragma unroll
    for (int j = 0; j < kColumns / kVector; ++j)
      words.of[j] = code_word(each([&](int k) {
        return part.number(row, j * kVector + k) * multipliers[j * kVector + k] * factor;
      }));
    *reinterpret_cast<Pack<uint32_t, kColumns / kVector>*>(t.by_rows.codes + at * t.by_rows_stride +
                                                           place.column) = words;
    if constexpr (kBlock == ScaleBlock::kPiece) {
      if (own_column() == 0) t.by_rows.scales[blockIdx.x * t.rows + at] = fp8_scale(factor);
    }
    if constexpr (kBlock == ScaleBlock::kRow) {
      if (place.column == 0) t.by_rows.scales[at] = fp8_scale(factor);
    }
    if constexpr (kBlock == ScaleBlock::kMatrix) {
      if (at == 0 && place.column == 0) t.by_rows.scales[0] = fp8_scale(factor);
    }
  }
}

// The factors of a tile's columns in shared memory, each computed once, and their scales.
template <typename T, ScaleBlock kBlock>
__device__ void column_factors(const Part<T>& part, const float (&multipliers)[kRows],
                               const Tiles& t, float (&factors)[kTile]) {
  __shared__ uint32_t maxes[kTile];
  if constexpr (kBlock == ScaleBlock::kPiece) {
    uint32_t most[kColumns] = {};
    add_column_maxes(part, multipliers, most);
    combine_column_maxes(most, maxes);
  }
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x;
  if (threadIdx.x < kTile && column < t.columns) {
    uint32_t most = 0;
    if constexpr (kBlock == ScaleBlock::kPiece) most = maxes[threadIdx.x];
    if constexpr (kBlock == ScaleBlock::kRow) most = t.column_amaxes[column];
    if constexpr (kBlock == ScaleBlock::kMatrix) most = t.row_amaxes[0];
    const float factor = factor_of(most);
    factors[threadIdx.x] = factor;
    if constexpr (kBlock == ScaleBlock::kPiece)
      t.by_columns.scales[blockIdx.y * t.columns + column] = fp8_scale(factor);
    if constexpr (kBlock == ScaleBlock::kRow) {
      if (blockIdx.y == 0) t.by_columns.scales[column] = fp8_scale(factor);
    }
    if constexpr (kBlock == ScaleBlock::kMatrix) {
      if (blockIdx.y == 0 && column == 0) t.by_columns.scales[0] = fp8_scale(factor);
    }
  }
  __syncthreads();
}

template <typename T, ScaleBlock kBlock>
__device__ void write_columns(const Part<T>& part, const Place& place, const Tiles& t) {
  __shared__ alignas(kPackBytes) TransposedTile transposed;
  __shared__ float factors[kTile];
  float multipliers[kRows];
  load_row_multipliers(t, place, multipliers);
  column_factors<T, kBlock>(part, multipliers, t, factors);
#pragma unroll
  for (int j = 0; j < kColumns / kVector; ++j) {
    const int first = own_column() + j * kVector;
    uint32_t words[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const uint32_t word = code_word(each([&](int k) {
        return part.number(row, j * kVector + k) * multipliers[row] * factors[first + k];
      }));
      words[row] = row < place.num_rows ? word : 0u;  // also where the factor is NaN
    }
    transposed.write(first, words);
  }
  __syncthreads();
  transposed.store(t.by_columns.codes, t.columns, t.padded_rows, t.padded_rows);
}

template <typename T, ScaleBlock kBlock>
__global__ void __launch_bounds__(kThreads) quantize_tiles_kernel(const T* numbers, Tiles t) {
  const Place place = own_place(blockIdx.y, t.rows, t.columns);
  Part<T> part;
  part.load(numbers, place, t.columns);
  if (t.by_rows.codes != nullptr) write_rows<T, kBlock>(part, place, t);
  if (t.by_columns.codes != nullptr) write_columns<T, kBlock>(part, place, t);
}

// --- on the host ---------------------------------------------------------------------------------

Tiles tiles_of_matrix(const QuantizeMemory& m, uint32_t* row_amaxes, uint32_t* column_amaxes) {
  return {m.rows,           m.columns,    padded(m.rows),       m.by_rows,
          m.by_rows_stride, m.by_columns, m.column_multipliers, m.row_multipliers,
          row_amaxes,       column_amaxes};
}

// Largest magnitudes of all matrices come before the codes of the first: they share those of rows.
template <typename T, ScaleBlock kBlock>
void launch(std::span<const QuantizeMemory> beside, uint32_t* amaxes, cudaStream_t stream) {
  const int64_t rows = beside.front().rows;
  int64_t columns = 0;
  for (const QuantizeMemory& m : beside) columns += m.columns;
  if constexpr (kBlock != ScaleBlock::kPiece)
    check_call(
        cudaMemsetAsync(amaxes, 0,
                        static_cast<size_t>(num_amaxes(kBlock, rows, columns)) * sizeof(uint32_t),
                        stream),
        "cudaMemsetAsync");
  const auto for_each = [&](const auto& call) {
    uint32_t* column_amaxes = amaxes + rows;
    for (const QuantizeMemory& m : beside) {
      call(static_cast<const T*>(m.numbers), tiles_of_matrix(m, amaxes, column_amaxes),
           tiles_of(m.rows, m.columns));
      column_amaxes += m.columns;
    }
  };
  if constexpr (kBlock == ScaleBlock::kRow)
    for_each([&](const T* numbers, const Tiles& tiles, dim3 grid) {
      const dim3 strips(grid.x, (grid.y + kTilesDown - 1) / kTilesDown);
      row_amax_kernel<T><<<strips, kThreads, 0, stream>>>(numbers, tiles);
    });
  if constexpr (kBlock == ScaleBlock::kMatrix)
    for_each([&](const T* numbers, const Tiles& tiles, dim3 grid) {
      matrix_amax_kernel<T><<<grid, kThreads, 0, stream>>>(numbers, tiles);
    });
  for_each([&](const T* numbers, const Tiles& tiles, dim3 grid) {
    quantize_tiles_kernel<T, kBlock><<<grid, kThreads, 0, stream>>>(numbers, tiles);
  });
}

// --- bytes alone ---------------------------------------------------------------------------------

// Every byte is read and written once, 16 at a time.
__global__ void __launch_bounds__(kThreads)
    transpose_bytes_kernel(TransposeMemory memory, int64_t padded_rows) {
  __shared__ alignas(kPackBytes) TransposedTile tile;
  const Place place = own_place(blockIdx.y, memory.rows, memory.columns);
  uint4 bytes[kRows] = {};
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (row < place.num_rows)
      bytes[row] = *reinterpret_cast<const uint4*>(
          memory.from + (place.row + row) * memory.columns + place.column);
  const auto write = [&](int part, uint32_t uint4::*word) {
    tile.write(own_column() + part * 4,
               {bytes[0].*word, bytes[1].*word, bytes[2].*word, bytes[3].*word});
  };
  write(0, &uint4::x);
  write(1, &uint4::y);
  write(2, &uint4::z);
  write(3, &uint4::w);
  __syncthreads();
  tile.store(memory.to, memory.columns, padded_rows, memory.to_stride);
}

}  // namespace

int64_t num_amaxes(ScaleBlock block, int64_t rows, int64_t columns) {
  if (block == ScaleBlock::kRow) return rows + columns;
  return block == ScaleBlock::kMatrix ? 1 : 0;
}

void quantize_tiles_on_device(std::span<const QuantizeMemory> beside, uint32_t* amaxes,
                              void* stream) {
  const QuantizeMemory& first = beside.front();
  with_kernel_type(first.dtype, "quantize_tiles", [&](auto zero) {
    using T = decltype(zero);
    const cudaStream_t on = cuda_stream(stream);
    if (first.block == ScaleBlock::kMatrix) launch<T, ScaleBlock::kMatrix>(beside, amaxes, on);
    if (first.block == ScaleBlock::kRow) launch<T, ScaleBlock::kRow>(beside, amaxes, on);
    if (first.block == ScaleBlock::kPiece) launch<T, ScaleBlock::kPiece>(beside, amaxes, on);
  });
  check_launch("quantize_tiles");
}

void quantize_on_device(std::span<const QuantizeMemory> beside, uint32_t* amaxes, void* stream) {
  const QuantizeMemory& first = beside.front();
  if (first.rows == 0 || first.columns == 0) return;
  if (beside.size() == 1 && first.block == ScaleBlock::kRow && first.by_columns.codes == nullptr)
    quantize_rows_on_device(first, stream);
  else
    quantize_tiles_on_device(beside, amaxes, stream);
}

void transpose_bytes_on_device(const TransposeMemory& memory, void* stream) {
  if (memory.rows == 0 || memory.columns == 0) return;
  transpose_bytes_kernel<<<tiles_of(memory.rows, memory.columns), kThreads, 0,
                           cuda_stream(stream)>>>(memory, padded(memory.rows));
  check_launch("transpose_bytes");
}

}  // namespace fsdp::nn
