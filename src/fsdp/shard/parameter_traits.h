// Special traits of parameters, by what their modules declare and by names in the options:
// where they lie on a mesh with tp and ep axes, whether they are quantised, whether they are
// matrices with one owner each.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/layout/box.h"
#include "fsdp/shard/module_roles.h"
#include "fsdp/shard/options.h"

namespace fsdp {

struct ModuleUnits;
struct OwnedParameter;

// --- placement -----------------------------------------------------------------------------------

// A slice for every expert along the first dim.
struct PerExpert {
  friend bool operator==(const PerExpert&, const PerExpert&) = default;
};

using DeclaredPlacement = std::variant<TpEqual, TpPartial, TpShard, PerExpert>;

// The declaration of one of the module's own parameters. UsageError for a module that is of two
// kinds.
DeclaredPlacement declared_placement(const torch::nn::Module& module, const std::string& parameter);

// For messages and facts: "cut over tp along dim 1"; "" for equal.
std::string to_text(const DeclaredPlacement& declared);

// The placements that options declare by name, beside what modules say.
class NamedPlacements {
 public:
  explicit NamedPlacements(const ShardOptions& options);

  // The parameter's placement, by either; a pattern may say what its module leaves open (equal).
  // UsageError where two of them contradict each other.
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

// Whether it is of a class in module_roles.h, with parameters of its own or without.
bool wants_ranks(const torch::nn::Module& module);
// Tells such a module which ranks it computes with, if the mesh has them.
void join_ranks(torch::nn::Module& module, const Mesh& mesh);

// --- recipes -------------------------------------------------------------------------------------

// Which parameters are quantised: those that their modules can multiply as codes, but for
// exceptions by name.
class ParameterRecipes {
 public:
  // The options must outlive it.
  explicit ParameterRecipes(const Quantization& options)
      : options_(options), is_used_(options.except.size(), false) {}

  // UsageError for a matrix that the recipe's blocks do not divide; `owned` is what a rank has of
  // it.
  WeightRecipe of(const OwnedParameter& parameter, const OwnedSlice& owned);

  // After all parameters: UsageError for an exception that none is, and for a recipe that nobody
  // uses.
  void check_all_are_used(const ModuleUnits& found) const;
  bool quantizes() const { return quantizes_; }

 private:
  const Quantization& options_;
  std::vector<bool> is_used_;  // by index of except
  bool quantizes_ = false;
};

// --- matrices ------------------------------------------------------------------------------------

// Which parameters have matrices with one owner each: those that their modules declare, and those
// that options name.
class ParameterMatrices {
 public:
  // The options must outlive it.
  explicit ParameterMatrices(const WholeMatrices& options)
      : options_(options),
        is_named_(options.named.size(), false),
        is_excepted_(options.except.size(), false) {}

  // The rows of the parameter's matrices (layout/flat_layout.h); empty: it has none, is frozen, or
  // is left out. UsageError for one whose matrices are cut over tp, or do not fill it.
  std::vector<int64_t> rows_of(const OwnedParameter& parameter, const PlacedParameter& placed);

  // After all parameters: UsageError for a pattern that matches no matrix, and for options that
  // find none at all.
  void check_all_are_used(const ModuleUnits& found) const;

 private:
  std::vector<int64_t> wanted_rows(const OwnedParameter& parameter);

  const WholeMatrices& options_;
  std::vector<bool> is_named_;     // by index of named
  std::vector<bool> is_excepted_;  // by index of except
  bool found_any_ = false;
};

}  // namespace fsdp
