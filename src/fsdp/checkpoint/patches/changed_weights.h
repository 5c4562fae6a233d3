// This rank's changed weights, by the names of published tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/patches.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

// Elements of one tensor, collected part by part: all of some ranges, or single ones.
class ChangedTensor {
 public:
  // Elements [to, to + values.numel()) of the flattened tensor.
  void add_range(int64_t to, at::Tensor values);
  // Single elements; `positions` are int64 and ascending, all of them in `among`.
  void add_elements(FlatRange among, at::Tensor positions, at::Tensor values);

  // Moves everything by `offset`.
  void shift(int64_t offset);
  void append(ChangedTensor other);
  bool is_empty() const { return parts_.empty(); }

  // In ascending order, whatever the order in which parts came.
  PatchTensor as_patch(std::string name, std::vector<int64_t> shape) &&;

 private:
  struct Part {
    FlatRange range;       // that has all of the part
    at::Tensor positions;  // undefined: everything in the range
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

  // Calls give(name, elements) once for each of the tensors, with this rank's part of what has
  // changed since the last call: on the device that has the weights; everything: on the CPU. Waits
  // for updates under way; all ranks call it.
  using Give = std::function<void(const std::string& name, ChangedTensor elements)>;
  void take(Which which, const Give& give);

 private:
  void give_buffers(const Give& give) const;

  const CheckpointState state_;
  const NameRules rules_;
  std::vector<StoredTensor> tensors_;
};

// --- positions in a file -------------------------------------------------------------------------

// The positions of a patch's elements in the form that takes the fewest bytes.

struct EncodedPositions {
  PositionForm form = PositionForm::kRanges;
  at::Tensor numbers;  // on the CPU
};

// `positions` are int64, ascending, at least one. The work is done where they are, so that a device
// sends about a byte of each.
EncodedPositions encoded(const at::Tensor& positions);
EncodedPositions encoded(std::span<const FlatRange> ranges);

}  // namespace fsdp
