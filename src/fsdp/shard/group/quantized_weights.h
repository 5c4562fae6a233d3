// The codes and scales of a group's matrices, made of the main weights after every update.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/state_bytes.h"
#include "fsdp/shard/group/flat_buffer.h"
#include "fsdp/shard/group/group_setting.h"
#include "fsdp/shard/group/main_weights.h"
#include "fsdp/shard/group/quantize_part.h"
#include "fsdp/shard/group/redistribution.h"
#include "fsdp/shard/layer_weights.h"

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
                   const GroupPaths& paths, const MainWeights& main_weights,
                   const FlatBuffer& codes);

  // Tasks of whoever changes main weights, on the device's current stream.
  void measure();
  void cast();
  // On the communicators of the axes that shard main weights; all ranks call it in the same order.
  Work start_combining(const Tag& tag, const Work& after) const;
  // All of it, for those who wait; nothing after forget_values().
  void quantize(const Tag& tag);
  // The main weights go, and the codes stay.
  void forget_values();

  // Scales of one byte take the paths of the codes, after them. `room`: behind the codes in their
  // slab.
  Work start_refresh(const Tag& tag, const Work& after);
  Work start_unshard(void* room, const Tag& tag, const Work& after);

  // One matrix of the whole group, whose codes these are.
  const QuantizedWeight& weight(int64_t index, const FlatBuffer& codes);

  // Counts this rank's casts since the last call: overflows, underflows and elements; int64, [3].
  at::Tensor take_counts();

 private:
  struct Matrix {
    int64_t rows = 0;
    int64_t columns = 0;
    SharedScales scales;
    int64_t first_scale = 0;  // among those of the group
  };
  // A part of a matrix in one contiguous run of main weights.
  struct Part {
    size_t matrix = 0;
    MatrixPart values;
    FlatRange flat;  // in the group
    at::Tensor codes;
    at::Tensor block_scales;
  };

  // The scales of one byte: this rank's, and the group's in a slab.
  struct BlockScales {
    FlatBuffer own;
    FlatBuffer whole;
    Redistribution refresh;
    Redistribution unshard;
  };
  struct CachedWeight {
    const void* codes = nullptr;
    QuantizedWeight weight;
  };

  void find_parts(const MainWeights& main_weights, const FlatBuffer& codes);
  QuantizedWeight made_of(int64_t index, const FlatBuffer& codes) const;
  void make_factors();

  const FlatLayout& layout_;
  const WeightRecipeRow& recipe_;
  const Quantization options_;
  const c10::Device device_;
  std::vector<Communicator*> shard_axes_;
  std::optional<FlatLayout> block_layout_;
  std::optional<BlockScales> block_scales_;
  std::vector<Matrix> matrices_;
  std::vector<CachedWeight> cache_;  // by matrix: pools hand out the same addresses every step
  std::vector<Part> parts_;
  bool has_values_ = true;
  Slab slab_;
  at::Tensor amaxes_;   // [shared scales of the group], int32: bits of magnitudes
  at::Tensor factors_;  // fp32
  at::Tensor scales_;   // fp32
  at::Tensor counts_;   // int64: QuantizeCounts, then elements
};

// From now on quantized_weight(parameter) is what `current` returns; nullptr: nullopt again. A tag
// of the tensor itself, so that layers find it in their backward, too.
void tag_quantized(const at::Tensor& parameter, std::function<QuantizedWeight()> current);

}  // namespace fsdp
