// The amaxes that delayed scales of quantised weights come from, as tensors of a checkpoint: beside
// the moments, as "<parameter>.amax_history".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/base/weight_recipe.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "fsdp/layout/owned_slice.h"

namespace fsdp {

inline constexpr char kAmaxHistorySuffix[] = ".amax_history";

// What a rank has of a matrix's history: a slice, if it has a slice of the matrix.
//
//   [1 + kAmaxHistory, scales below each other, side by side]           of the whole matrix
//   [slices, 1 + kAmaxHistory, scales below each other, side by side]   of slices by themselves
//
// The first form is for scales that no border of a slice cuts: any number of slices reads it.
struct AmaxHistory {
  std::vector<int64_t> shape;  // of the slice; without elements: the recipe has no such scales
  OwnedSlice owned = {};
};

// `shape`: of the slice of the matrix.
AmaxHistory amax_history_of(WeightRecipe recipe, const std::vector<int64_t>& shape,
                            const OwnedSlice& owned);

// Rules that divide a parameter leave its history whole, under the name in the model.
std::string amax_history_name(const NameRules& rules, const std::string& parameter,
                              const std::vector<int64_t>& whole_shape);

// What is stored beside the model, under the names that the rules give it.
TensorSet moments_of(const TensorCatalog& catalog, const NameRules& rules);
TensorSet amax_histories_of(const TensorCatalog& catalog, const NameRules& rules);

}  // namespace fsdp
