// The content of a checkpoint: a sharded model, its optimizer and tensors that every rank has; and
// the form in which it is stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "fsdp/shard/sharded.h"

namespace fsdp {

class Optimizer;

// A tensor that is not a parameter and equal on all ranks: a running mean, a table.
struct NamedBuffer {
  std::string name;
  at::Tensor value;
};

// The state of an optimizer that is none of this library's, and keeps tensors with one number for
// each of a parameter's.
struct OtherOptimizer {
  std::string name;                       // "Adagrad"
  int64_t step = 0;                       // updates that were made
  std::vector<std::string> tensors = {};  // "sum"; loading brings those of the checkpoint
  // This rank's part of each, {parameter, tensor}: fp32, in the optimizer's placement. None: 0.
  std::map<std::pair<std::string, std::string>, at::Tensor> parts = {};
};

// Refers to objects that must outlive it.
struct CheckpointState {
  Sharded sharded;
  Optimizer* optimizer = nullptr;   // nullptr: weights alone
  OtherOptimizer* other = nullptr;  // in its place
  std::vector<NamedBuffer> buffers = {};
};

struct StoredForm {
  // The names of tensors in files, and the sections of fused ones.
  NameRules names = {};
  // The type of floating-point weights. nullopt: that of the main weights, which is exact.
  std::optional<DType> model_dtype = std::nullopt;
  // The parameters that are stored, by their names in the module tree; globs. None: all.
  std::vector<std::string> only = {};
};

}  // namespace fsdp
