#include "fsdp/base/weight_recipe.h"

#include <array>

namespace fsdp {

namespace {

using enum WeightRecipe;

constexpr std::array<WeightRecipeRow, 5> kRecipes = {{
    {kPlain, "bf16", 0, 0, 0},
    {kFp8Tensor, "fp8-tensor", 0, 0, 4},
    {kFp8Row, "fp8-row", 1, 0, 4},
    {kFp8Block, "fp8-block", 128, 128, 4},
    {kMxFp8, "mxfp8", 1, 32, 1},
}};

}  // namespace

const WeightRecipeRow& row_of(WeightRecipe recipe) { return kRecipes[static_cast<size_t>(recipe)]; }

std::span<const WeightRecipeRow> all_weight_recipes() { return kRecipes; }

std::optional<WeightRecipe> parse_weight_recipe(std::string_view name) {
  for (const WeightRecipeRow& row : kRecipes)
    if (row.name == name) return row.recipe;
  return std::nullopt;
}

}  // namespace fsdp
