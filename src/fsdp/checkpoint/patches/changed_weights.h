// This rank's changed weights, by the names of published tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/patches.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

class GroupUpdate;
class ParamGroup;

// Elements of one tensor, collected part by part: all of some ranges, or single ones.
class ChangedTensor {
 public:
  // Elements [to, to + values.numel()) of the flattened tensor.
  void add_range(int64_t to, at::Tensor values);
  // Single elements; `positions` are int64 and ascending.
  void add_elements(at::Tensor positions, at::Tensor values);

  // Moves everything by `offset`.
  void shift(int64_t offset);
  void append(ChangedTensor other);
  bool is_empty() const { return parts_.empty(); }

  // In ascending order, whatever the order in which parts came.
  PatchTensor as_patch(std::string name, std::vector<int64_t> shape) &&;

 private:
  struct Part {
    int64_t begin = 0;     // of the range, or the first position
    at::Tensor positions;  // undefined: a range
    at::Tensor values;
  };
  std::vector<Part> parts_;
};

// Reads the marks of an optimizer and the weights that they mark.
class ChangedWeights {
 public:
  enum class Which : uint8_t { kChanged, kEverything };

  // UsageError if the optimizer keeps no marks.
  ChangedWeights(const CheckpointState& state, const NameRules& rules);

  // All tensors of the model under published names, with the types that compute.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }

  // This rank's part of what has changed since the last call. Waits for updates under way; all
  // ranks call it.
  std::map<std::string, ChangedTensor> take(Which which);

 private:
  void take_group(ParamGroup& group, GroupUpdate* update, bool is_everything, int64_t& number,
                  std::map<std::string, ChangedTensor>& changed);
  void add_member(const ParamGroup& group, const GroupUpdate* update, int64_t index,
                  bool is_everything, std::map<std::string, ChangedTensor>& changed) const;

  const CheckpointState state_;
  const NameRules rules_;
  std::vector<StoredTensor> tensors_;
};

}  // namespace fsdp
