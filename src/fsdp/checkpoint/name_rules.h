// How model tensors are named and divided in a checkpoint: rules as data, no code per model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/tensor_sections.h"

namespace fsdp {

class NameRules {
 public:
  // No rules: every tensor is one section, itself.
  NameRules() = default;

  // What a tensor is stored as: sections that together are exactly the tensor, in its order.
  std::vector<TensorSection> sections(const std::string& name,
                                      std::span<const int64_t> shape) const;

  // The same for names read from a checkpoint: its fused tensors are divided like those of the
  // model, so that both sides meet; names that already are what the rules make stay as they are.
  std::vector<TensorSection> sections_of_stored(const std::string& name,
                                                std::span<const int64_t> shape) const;
};

}  // namespace fsdp
