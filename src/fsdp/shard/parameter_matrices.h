// Which parameters are matrices with one owner each: those that their modules declare, and those
// that options name.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/shard/module_units.h"
#include "fsdp/shard/options.h"
#include "fsdp/shard/parallel_parameters.h"

namespace fsdp {

class ParameterMatrices {
 public:
  // The options must outlive it.
  explicit ParameterMatrices(const WholeMatrices& options)
      : options_(options),
        is_named_(options.named.size(), false),
        is_excepted_(options.except.size(), false) {}

  // The rows of the parameter's matrices (layout/matrix_parts.h); empty: it has none, is frozen, or
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
