// Matrices to fp8 codes and scales as CUDA kernels, with the bits of base/block_scale.h. Calls
// enqueue on a stream (a cudaStream_t) and never wait; shapes alone decide what is started. All
// pointers are memory of the current device and begin at multiples of 16 bytes. In builds without
// CUDA every function throws an Error.
#pragma once

#include <cstdint>
#include <span>

#include "fsdp/base/dtype.h"

namespace fsdp::nn {

// The numbers of a matrix that have one scale.
enum class ScaleBlock : uint8_t {
  kMatrix,  // all
  kRow,     // a row
  kPiece,   // kScalePiece of a row
  kSquare,  // kScalePiece of kScalePiece rows: weights alone
};

inline constexpr int64_t kScalePiece = 128;

// What a device multiplies has rows of so many codes, or a multiple.
inline constexpr int64_t kCodeMultiple = 16;

struct CodesMemory {
  uint8_t* codes = nullptr;  // null: not wanted
  // kMatrix: one; kRow: one per row; kPiece: one per row for the first pieces, then for the second
  // ones, ...
  float* scales = nullptr;
};

// [rows, columns], dense; columns: a multiple of kCodeMultiple (kPiece beside others: of
// kScalePiece).
struct QuantizeMemory {
  DType dtype = DType::kBFloat16;
  ScaleBlock block = ScaleBlock::kRow;  // not kSquare
  int64_t rows = 0;
  int64_t columns = 0;
  const void* numbers = nullptr;
  // Of the numbers, each multiplied by its column's multiplier first.
  CodesMemory by_rows;
  int64_t by_rows_stride = 0;                 // codes from one row to the next
  const float* column_multipliers = nullptr;  // null: all are 1
  // Of the transposed matrix, [columns, rows rounded up to a multiple of kCodeMultiple], with zeros
  // at the end; of the numbers times their row's multiplier. kMatrix: the scales of by_rows, if
  // that is wanted.
  CodesMemory by_columns;
  const float* row_multipliers = nullptr;
};

// Matrices of as many rows, side by side: kRow has one scale for a whole row of them, and they
// write it to the same place. kMatrix: one matrix. amaxes: work space, num_amaxes() for the rows
// and columns of all; for both forms, whether they are wanted or not.
int64_t num_amaxes(ScaleBlock block, int64_t rows, int64_t columns);
void quantize_on_device(std::span<const QuantizeMemory> beside, uint32_t* amaxes, void* stream);

// [rows, columns] of bytes to [columns, rows rounded up to a multiple of kCodeMultiple], with zeros
// at the end.
struct TransposeMemory {
  int64_t rows = 0;
  int64_t columns = 0;  // a multiple of kCodeMultiple
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  int64_t to_stride = 0;
};
void transpose_bytes_on_device(const TransposeMemory& memory, void* stream);

// --- the parts of quantize_on_device() -----------------------------------------------------------

// kRow, of one matrix by rows alone: every row is read once.
void quantize_rows_on_device(const QuantizeMemory& memory, void* stream);
// Any form of any block.
void quantize_tiles_on_device(std::span<const QuantizeMemory> beside, uint32_t* amaxes,
                              void* stream);

}  // namespace fsdp::nn
