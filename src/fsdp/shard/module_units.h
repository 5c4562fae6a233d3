// Reads a module tree: which units it has, and which unit owns which parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/shard/unit.h"

namespace fsdp {

// A parameter with all its names; the first one is where the tree has it first.
struct OwnedParameter {
  std::vector<std::string> names;
  at::Tensor tensor;
};

struct FoundUnit {
  std::string name;          // its path in the tree; the root is "model"
  UnitBase* unit = nullptr;  // nullptr: the parameters outside any unit
  int32_t parent = -1;       // the unit around it
  bool encloses_units = false;
  std::vector<OwnedParameter> parameters = {};
  std::vector<int32_t> shares_with = {};  // units that own parameters this one has, too
};

// One module with parameters or buffers of its own, in the order of construction: children before
// their parent, which registers its own parameters after its members.
struct FoundModule {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

struct ModuleUnits {
  std::vector<FoundUnit> units;  // in order of registration; without those that own nothing
  std::vector<FoundModule> modules;
};

// A parameter belongs to the innermost unit around it, and, where several modules share it, to the
// first one that has it. Error for a model that has no parameters or is already sharded.
ModuleUnits find_units(const std::shared_ptr<torch::nn::Module>& model);

}  // namespace fsdp
