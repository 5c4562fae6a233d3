// Patches of a model's weights: what has changed since the one before, for receivers such as
// inference engines. docs/weights-out.md has the format of their files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/names/name_rules.h"

namespace fsdp {

// The names of tensors in patches.
enum class PatchNames : uint8_t {
  kPublished,  // as models are published: those of checkpoints, by the same rules
  kVllm,       // the same, then fused as vLLM has them: q, k and v; gate and up; experts
};

struct PatchOptions {
  // The rules that a checkpoint of the model has (StoredForm::names).
  NameRules rules = {};
  PatchNames names = PatchNames::kPublished;
  // write() lets a full patch follow so many patches, at the same step, and removes whatever is
  // older than the full one before it. 0: it removes nothing.
  int64_t keep = 0;
};

// Elements [begin, end) of a flattened tensor.
struct PatchRange {
  int64_t begin = 0;
  int64_t end = 0;

  friend bool operator==(const PatchRange&, const PatchRange&) = default;
};

// The changed elements of one tensor that this rank brings; other ranks bring others.
struct PatchTensor {
  std::string name;
  std::vector<int64_t> shape;  // of the whole tensor
  // Places in the flattened whole, ascending: positions (int64), or if that is undefined, ranges.
  at::Tensor positions;
  std::vector<PatchRange> ranges;
  at::Tensor values;  // of these elements, one-dimensional, with the bits that compute
};

struct Patch {
  std::string base;             // of the stream; patches of different bases do not fit each other
  std::optional<int64_t> from;  // nullopt: a full patch, which has every element of every tensor
  int64_t to = 0;               // the weights after this step
  std::vector<PatchTensor> tensors;
};

// A sequence of patches, of which the first is full. All ranks call everything, in the same order.
// Where several streams share an optimizer, each writes a full patch after another took the marks.
//
// Complete by construction: updates mark what they change (StepOptions::marks_changes), and
// whatever else sets weights (loading, full_parameters() to write, refresh_weights()) counts as a
// change of all weights of its groups. A weight that changed back is in the patch, too.
class PatchStream {
 public:
  // The state's optimizer must mark changes; its buffers are in every patch. UsageError if it does
  // not. `state` refers to objects that must outlive the stream.
  explicit PatchStream(const CheckpointState& state, PatchOptions options = {});
  ~PatchStream();
  PatchStream(const PatchStream&) = delete;
  PatchStream& operator=(const PatchStream&) = delete;

  // This rank's part of the patch from the one before to now, the weights after `step`, as
  // tensors on the device `where`. Waits for updates under way. If it fails, the next patch is a
  // full one.
  Patch take(int64_t step, c10::Device where = at::kCPU);

  // Writes the patch as a directory in `directory`, which appears when all ranks have written their
  // part; it replaces one of that name. Returns its path. If that fails, the next patch is a full
  // one.
  std::string write(const std::string& directory, int64_t step);

 private:
  class Impl;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp
