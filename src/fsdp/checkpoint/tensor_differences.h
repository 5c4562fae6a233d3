// In which tensors, and by how much, two checkpoints differ.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/tensor_stream.h"

namespace fsdp {

// Tensors of one checkpoint, and the files they lie in.
struct TensorsInFiles {
  const TensorSet& tensors;
  std::span<const CheckedFile> files;
};

struct TensorDifference {
  std::string name;
  // nullopt: the checkpoint has no such tensor.
  std::optional<StoredTensor> first = std::nullopt;
  std::optional<StoredTensor> second = std::nullopt;
  // Where both have it, in the same shape. Of one dtype elements are equal if all their bits are;
  // of two, if they are the same number (all NaN are).
  int64_t num_different = 0;
  // NaN where one is NaN and the other is a number.
  double max_difference = 0.0;

  bool is_only_in_one() const { return !first || !second; }
  bool has_other_shape() const { return !is_only_in_one() && first->shape != second->shape; }
  bool has_other_dtype() const { return !is_only_in_one() && first->dtype != second->dtype; }
};

// All that differ, by name; reads every tensor that both have.
std::vector<TensorDifference> differences_of(const TensorsInFiles& first,
                                             const TensorsInFiles& second,
                                             const OnBytes& on_bytes = {});

// What differences_of() will tell on_bytes about, in all.
int64_t bytes_to_compare(const TensorSet& first, const TensorSet& second);

}  // namespace fsdp
