// The content of a checkpoint: a sharded model, its optimizer and tensors that every rank has; and
// the form in which it is stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
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

// Refers to objects that must outlive it.
struct CheckpointState {
  Sharded sharded;
  Optimizer* optimizer = nullptr;  // nullptr: weights alone
  std::vector<NamedBuffer> buffers = {};
};

struct StoredForm {
  // The names of tensors in files, and the sections of fused ones.
  NameRules names = {};
  // The type of floating-point weights. nullopt: that of the main weights, which is exact.
  std::optional<DType> model_dtype = std::nullopt;
};

}  // namespace fsdp
