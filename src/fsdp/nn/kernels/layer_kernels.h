// The element-wise parts of the layers as CUDA kernels: one launch where ATen takes a pass over
// memory per operation. Computed in fp32, rounded once to the numbers' type (fp32, bf16 or fp16);
// the same bits in every run. Calls enqueue on a stream (a cudaStream_t) and never wait. All
// pointers are memory of the current device. In builds without CUDA every function throws an Error.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "fsdp/base/dtype.h"

namespace fsdp::nn {

// The target of a position that predicts nothing.
inline constexpr int64_t kNoTarget = -100;

// Whether this build has the kernels.
bool has_device_layers();

// The first number of a CUDA device's compute capability, 9 for an H200; 0 without CUDA.
int device_generation(int device);

// --- rotary positions ----------------------------------------------------------------------------

// [batch, sequence, heads, head_dim], strided but for the last dimension; the result is dense.
struct RotatedHeads {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t num_heads = 0;
  std::array<int64_t, 3> strides{};  // of batch, sequence and heads in `from`, in elements
};

struct RotationShape {
  DType dtype = DType::kBFloat16;
  int64_t batch = 0;
  int64_t sequence = 0;
  int64_t head_dim = 0;
};

// [sequence, head_dim / 2] each, dense; one such table for each sequence of the batch, or for all.
struct RotationAngles {
  const float* cosine = nullptr;
  const float* sine = nullptr;
  int64_t batch_stride = 0;  // from one table to the next
  float sign = 1.0f;         // -1: rotate back
};

// Queries and keys in one launch.
void rotate_on_device(const std::array<RotatedHeads, 2>& heads, const RotationShape& shape,
                      const RotationAngles& angles, void* stream);

// --- gated MLP -----------------------------------------------------------------------------------

enum class GatedActivation : uint8_t {
  kSilu,
  kGelu,
  kGeluTanh,  // its approximation by tanh
};

// `numel` numbers. Gate, up and their gradients are rows of `columns` numbers whose beginnings are
// `stride` numbers apart; the result and its gradient are dense.
struct GatedMemory {
  GatedActivation activation = GatedActivation::kSilu;
  DType dtype = DType::kBFloat16;
  int64_t numel = 0;
  int64_t columns = 0;
  int64_t stride = 0;
  const void* gate = nullptr;
  const void* up = nullptr;
};

// result = activation(gate) * up
void gated_on_device(const GatedMemory& memory, void* result, void* stream);

// Gradients of the sum of gradient * result.
void gated_backward_on_device(const GatedMemory& memory, const void* gradient, void* gate_gradient,
                              void* up_gradient, void* stream);

// --- experts -------------------------------------------------------------------------------------

// Experts whose numbers sort_choices_on_device() can count in the memory that a block shares.
inline constexpr int64_t kMaxSortedExperts = 1024;

// The choices of experts, [num_choices], in the order of experts, and of choices among those of one
// expert.
struct ChoiceOrder {
  int64_t num_choices = 0;
  int64_t num_experts = 0;  // at most kMaxSortedExperts
  const int64_t* chosen = nullptr;
  int32_t* block_counts = nullptr;  // work space for choice_block_counts() numbers
  int64_t* order = nullptr;         // the choice at each place
  int64_t* inverse = nullptr;       // the place of each choice
  int64_t* ends = nullptr;          // per expert
};
int64_t choice_block_counts(int64_t num_choices, int64_t num_experts);
void sort_choices_on_device(const ChoiceOrder& order, void* stream);

// Tokens as sums of rows times weights: [num_tokens, size] of num_chosen rows each. All dense.
struct CombineMemory {
  DType dtype = DType::kBFloat16;
  int64_t num_tokens = 0;
  int64_t num_chosen = 0;
  int64_t size = 0;
  const void* rows = nullptr;              // [any, size]
  const int64_t* row_of_choice = nullptr;  // [num_tokens, num_chosen]; -1: none
  const void* weights = nullptr;           // [num_tokens, num_chosen]; null: all are 1
};
void combine_on_device(const CombineMemory& memory, void* result, void* stream);

// Gradients of the sum of gradient * result. Rows that no choice has are not written.
void combine_backward_on_device(const CombineMemory& memory, const void* gradient, void* of_rows,
                                void* of_weights, void* stream);

// --- cross entropy -------------------------------------------------------------------------------

// The figures that are computed of rows of logits.
enum class RowWork : uint8_t {
  kSums,
  kGradient,  // from sums that are there
  kBoth,
};

// Every row has three sums, the base, the logarithm and the gap: base + logarithm is that of the
// sum of exponentials, and base - gap the target's logit.
inline constexpr int64_t kRowSums = 3;

// Logits: [num_rows, num_columns], dense; columns are tokens of the vocabulary from `first_token`
// on. Rows whose target is kNoTarget have a gradient of 0, and sums without meaning.
struct LogitRowsMemory {
  DType dtype = DType::kBFloat16;
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  void* logits = nullptr;            // softmax minus one at the target takes their place
  const int64_t* targets = nullptr;  // per row; asserts a token of the vocabulary or kNoTarget
  int64_t first_token = 0;
  int64_t vocabulary = 0;
  float* sums = nullptr;  // [kRowSums, sums_stride]; the gap is 0 where the target is no column
  int64_t sums_stride = 0;
};
void cross_entropy_rows_on_device(RowWork work, const LogitRowsMemory& memory, void* stream);

struct CrossEntropyMean {
  int64_t num_rows = 0;
  const int64_t* targets = nullptr;  // of the rows
  const float* sums = nullptr;       // [kRowSums, num_rows]
  int64_t num_all = 0;               // of the targets that are counted
  const int64_t* all_targets = nullptr;
};

// *weight = 1 / (all targets that are tokens), at most 1; *loss = the rows' losses times it.
void cross_entropy_mean_on_device(const CrossEntropyMean& mean, float* weight, float* loss,
                                  void* stream);

// --- root-mean-square norm -----------------------------------------------------------------------

// The longest row, in packs of 16 bytes.
inline constexpr int64_t kMaxNormPacks = 1024;
bool norm_fits_device(DType dtype, int64_t size);

// Rows and weight are dense and begin at multiples of 16 bytes.
struct NormInput {
  DType dtype = DType::kBFloat16;
  int64_t num_rows = 0;
  int64_t size = 0;  // of a row
  float eps = 0.0f;
  const void* x = nullptr;
  const void* added = nullptr;  // null, or like x: x + added is normed
  const void* weight = nullptr;
  float weight_offset = 0.0f;  // factors are this + weight
};

struct NormOutput {
  void* sum = nullptr;  // x + added, if something is added
  void* normed = nullptr;
  float* scales = nullptr;  // per row: 1 / sqrt(mean(x^2) + eps)
};

void rms_norm_on_device(const NormInput& input, const NormOutput& output, void* stream);

struct NormGradients {
  const float* scales = nullptr;
  const void* of_normed = nullptr;
  const void* of_sum = nullptr;  // null: 0
  void* of_x = nullptr;          // also the gradient of `added`
  void* of_weight = nullptr;
  float* weight_sums = nullptr;  // work space: norm_weight_sums() times the size of a row
};
int64_t norm_weight_sums(int64_t num_rows);

// `input.x` is the normed input, with `added` in it.
void rms_norm_backward_on_device(const NormInput& input, const NormGradients& gradients,
                                 void* stream);

// --- matrices to fp8 codes and scales, with the bits of base/block_scale.h -----------------------

// The numbers of a matrix that have one scale.
enum class ScaleBlock : uint8_t {
  kMatrix,  // all
  kRow,     // a row
  kPiece,   // kScalePiece of a row
  kSquare,  // kScalePiece of kScalePiece rows: weights alone
};

inline constexpr int64_t kScalePiece = 128;

// A device multiplies rows of so many codes, or of a multiple.
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
  // Codes of the numbers, each multiplied by its column's multiplier first.
  CodesMemory by_rows;
  int64_t by_rows_stride = 0;                 // codes from one row to the next
  const float* column_multipliers = nullptr;  // null: all are 1
  // Codes of the transposed matrix, [columns, rows rounded up to a multiple of kCodeMultiple], with
  // zeros at the end; of the numbers times their row's multiplier. kMatrix: the scales of by_rows,
  // if that is wanted.
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
