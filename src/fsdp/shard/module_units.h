// Reads a module tree: its units, and the parameters that each unit owns.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/shard/parameter_traits.h"
#include "fsdp/shard/unit.h"

namespace fsdp {

// A parameter with all its names, in the order of the tree.
struct OwnedParameter {
  std::vector<std::string> names;
  at::Tensor tensor;
  DeclaredPlacement declared = {};        // by its module, or by its name
  bool is_quantizable = false;            // by all modules that have it
  std::vector<int64_t> matrix_rows = {};  // as all modules that have it declare them (MatrixModule)
};

struct FoundUnit {
  // Its path in the tree. The root is "model", or "(model)" where a child is called "model".
  std::string name;
  // One of both; neither: for the parameters outside any unit.
  UnitBase* unit = nullptr;             // declared as Unit<M>
  torch::nn::Module* module = nullptr;  // named by ShardOptions::units
  int32_t parent = -1;                  // the unit around it
  bool encloses_units = false;
  std::vector<OwnedParameter> parameters = {};
  std::vector<int32_t> shares_with = {};  // units that own parameters this one has, too

  bool is_outside() const { return unit == nullptr && module == nullptr; }
};

// A module with its own parameters or buffers, or one that computes with other ranks, in the order
// of construction: children before their parent, which registers its own parameters after its
// members.
struct FoundModule {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

struct ModuleUnits {
  std::vector<FoundUnit> units;  // in order of registration; without those that own nothing
  std::vector<FoundModule> modules;
};

// A parameter belongs to the innermost unit around it and, if several modules share it, to the
// first one that has it. Units are the modules declared as Unit<M> and those that `options.units`
// names. Error for a model that has no parameters or is already sharded, and for a name in the
// options that matches nothing.
ModuleUnits find_units(const std::shared_ptr<torch::nn::Module>& model,
                       const ShardOptions& options);

}  // namespace fsdp
