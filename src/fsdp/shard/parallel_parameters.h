// From what modules declare of their parameters to where these lie on a mesh with tp and ep axes.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "fsdp/comm/mesh.h"
#include "fsdp/comm/parameter_kind.h"
#include "fsdp/layout/owned_slice.h"
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
