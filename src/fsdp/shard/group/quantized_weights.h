// The codes and scales of a group's matrices, made of the main weights after every update.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/quantized_bytes.h"
#include "fsdp/shard/group/flat_buffer.h"
#include "fsdp/shard/group/group_setting.h"
#include "fsdp/shard/group/main_weights.h"
#include "fsdp/shard/group/quantize_part.h"
#include "fsdp/shard/quantized_weight.h"

namespace fsdp {

// Sharded quantisation is that of the whole matrix, bit for bit: a rank measures the largest
// magnitudes in its part of the main weights, the ranks combine them (the maximum has no order),
// and each rank casts its part. Blocks with scales of one byte are never cut, because shards begin
// and end aligned; their scales lie in a buffer with the cuts of the codes.
//
// After an update:  measure()  ->  start_combining()  ->  cast()  ->  gathers of codes.
class QuantizedWeights {
 public:
  // The arguments must outlive it. `codes`: this rank's part, in bytes, with the cuts of the
  // layout.
  QuantizedWeights(const FlatLayout& layout, const GroupTypes& types, const GroupSetting& setting,
                   const MainWeights& main_weights, const FlatBuffer& codes);

  // Tasks of whoever changes main weights, on the device's current stream.
  void measure();
  void cast();
  // With delayed scaling cast() needs no amaxes of this update: it comes before they are combined,
  // and remember() after that.
  bool casts_before_combining() const { return history_.defined(); }
  void remember();
  // On the communicators of the axes that shard main weights; all ranks call it in the same order.
  Work start_combining(const Tag& tag, const Work& after) const;
  // All of it, for those who wait. kValues: the main weights have other values, of no update; with
  // delayed scaling the history of a matrix is what set_history() gave, or begins now.
  enum class After : uint8_t { kUpdate, kValues };
  void quantize(const Tag& tag, After after);

  // This rank's scales of one byte, and those of the whole group in a slab.
  bool has_block_scales() const { return block_scales_.has_value(); }
  const FlatBuffer& block_scales() const { return *block_scales_; }
  const FlatLayout& block_layout() const { return *block_layout_; }

  // One matrix: `codes` and `block_scales` of the whole group (undefined where there are none).
  QuantizedWeight weight(int64_t index, const at::Tensor& codes,
                         const at::Tensor& block_scales) const;

  // Of this rank's casts since the last call: overflows, underflows and elements; int64, [3].
  at::Tensor take_counts();

  // With delayed scaling, for checkpoints: the amaxes of the main weights, then those of the
  // kAmaxHistory updates before, which the codes were made with; fp32, [1 + kAmaxHistory, shared
  // scales of the matrix].
  bool has_history() const { return history_.defined(); }
  at::Tensor history_of(int64_t index) const;
  void set_history(int64_t index, const at::Tensor& amaxes);

 private:
  struct Matrix {
    int64_t rows = 0;
    int64_t columns = 0;
    SharedScales scales;
    int64_t first_scale = 0;  // among those of the group
    bool has_given_history = false;
  };
  // A part of a matrix in one contiguous run of main weights.
  struct Part {
    size_t matrix = 0;
    MatrixPart values;
    FlatRange flat;  // in the group
    at::Tensor codes;
    at::Tensor block_scales;
  };

  void find_parts(const FlatLayout& layout, const MainWeights& main_weights,
                  const FlatBuffer& codes);
  at::Tensor history_columns(const Matrix& matrix) const;
  void make_factors(const at::Tensor& amaxes);
  void cast_parts();

  const WeightRecipeRow& recipe_;
  const Quantization options_;
  const c10::Device device_;
  std::vector<Communicator*> shard_axes_;
  std::optional<FlatLayout> block_layout_;
  std::optional<FlatBuffer> block_scales_;
  std::vector<Matrix> matrices_;
  std::vector<Part> parts_;
  Slab slab_;
  at::Tensor amaxes_;   // [shared scales of the group], int32: bits of magnitudes
  at::Tensor factors_;  // fp32
  at::Tensor scales_;   // fp32
  at::Tensor history_;  // [1 + kAmaxHistory, shared scales], int32; the newest one first
  at::Tensor counts_;   // int64: QuantizeCounts, then elements
};

}  // namespace fsdp
