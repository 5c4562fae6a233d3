// Which parameters are quantised: those that their modules can multiply so, but for exceptions by
// name.
#pragma once

#include <vector>

#include "fsdp/layout/owned_slice.h"
#include "fsdp/shard/module_units.h"
#include "fsdp/shard/options.h"

namespace fsdp {

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
  bool is_excepted(const OwnedParameter& parameter);

  const Quantization& options_;
  std::vector<bool> is_used_;  // by index of except
  bool quantizes_ = false;
};

}  // namespace fsdp
