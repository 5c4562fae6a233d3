// From what modules declare of their parameters to where these lie on a mesh with tp and ep axes.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/comm/parameter_kind.h"
#include "fsdp/layout/owned_slice.h"
#include "fsdp/shard/options.h"
#include "fsdp/shard/parallel_module.h"

namespace fsdp {

// A slice for every expert along the first dim.
struct PerExpert {
  friend bool operator==(const PerExpert&, const PerExpert&) = default;
};

using DeclaredPlacement = std::variant<TpEqual, TpPartial, TpShard, PerExpert>;

// Of one of the module's own parameters. UsageError for a module that is of two kinds.
DeclaredPlacement declared_placement(const torch::nn::Module& module, const std::string& parameter);

// For messages and facts: "cut over tp along dim 1"; "" for equal.
std::string to_text(const DeclaredPlacement& declared);

// The same of ShardOptions::tensor_parameters: "*.up.weight cut over tp along dim 0".
std::vector<std::string> to_texts(const std::vector<TensorParameters>& named);

// What options say of parameters by name, beside what modules say.
class NamedPlacements {
 public:
  explicit NamedPlacements(const ShardOptions& options);

  // Of the parameter, by either; a pattern may say what its module leaves open (equal). UsageError
  // where two of them contradict each other.
  DeclaredPlacement placement_of(const std::string& parameter, const DeclaredPlacement& by_module);

  // UsageError for a pattern that has matched no parameter so far, with the nearest of the names.
  void check_all_are_used(const std::vector<std::string>& names) const;

 private:
  struct Pattern {
    const char* option;
    std::string glob;
    DeclaredPlacement placement;
    bool is_used = false;

    std::string text() const;
  };
  std::vector<Pattern> patterns_;  // those of one option in order
};

struct PlacedParameter {
  ParameterKind kind = ParameterKind::kEqual;
  OwnedSlice owned = {};
};

// UsageError that names the parameter, for a shape that the ranks cannot share as declared.
PlacedParameter place_on(const Mesh& mesh, const DeclaredPlacement& declared,
                         const std::string& name, std::span<const int64_t> shape);

// Whether it is of a class in parallel_module.h, with parameters of its own or without.
bool wants_ranks(const torch::nn::Module& module);
// Tells such a module which ranks it computes with, if the mesh has them.
void join_ranks(torch::nn::Module& module, const Mesh& mesh);

}  // namespace fsdp
