#include "fsdp/base/weight_recipe.h"

#include <array>

namespace fsdp {

namespace {

using enum WeightRecipe;

constexpr std::array<WeightRecipeRow, 6> kRecipes = {{
    {kPlain, "bf16", 0, 0, 0, 0, false},
    {kFp8Tensor, "fp8-tensor", 8, 0, 0, 4, false},
    {kFp8Row, "fp8-row", 8, 1, 0, 4, false},
    {kFp8Block, "fp8-block", 8, 128, 128, 4, false},
    {kMxFp8, "mxfp8", 8, 1, 32, 1, false},
    {kNvFp4, "nvfp4", 4, 1, 16, 1, true},
}};

constexpr std::array<WeightScaling, 2> kScalings = {WeightScaling::kCurrent,
                                                    WeightScaling::kDelayed};

}  // namespace

const WeightRecipeRow& row_of(WeightRecipe recipe) { return kRecipes[static_cast<size_t>(recipe)]; }

std::span<const WeightRecipeRow> all_weight_recipes() { return kRecipes; }

std::optional<WeightRecipe> parse_weight_recipe(std::string_view name) {
  for (const WeightRecipeRow& row : kRecipes)
    if (row.name == name) return row.recipe;
  return std::nullopt;
}

std::string_view name_of(WeightScaling scaling) {
  return scaling == WeightScaling::kCurrent ? "current" : "delayed";
}

std::span<const WeightScaling> all_weight_scalings() { return kScalings; }

}  // namespace fsdp
