// How weights compute: as numbers of their type, or quantised, as narrow codes and scales.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace fsdp {

enum class WeightRecipe : uint8_t {
  kPlain,      // in the type in which the parameter computes
  kFp8Tensor,  // e4m3, one fp32 scale for a matrix
  kFp8Row,     // e4m3, one fp32 scale for each row
  kFp8Block,   // e4m3, one fp32 scale for each 128 x 128 block
  kMxFp8,      // e4m3, one power of two (E8M0) for each 32 elements of a row
};

// The differences of recipes, as data.
struct WeightRecipeRow {
  WeightRecipe recipe;
  std::string_view name;  // "bf16" (plain), "fp8-tensor", "fp8-row", "fp8-block", "mxfp8"
  // A scale's rows and columns of the matrix; 0: all of them.
  int64_t scale_rows;
  int64_t scale_columns;
  // Scales of one byte belong to elements that lie side by side. They are as many as a 32nd of the
  // codes, so they are sharded and gathered like those. Scales of four bytes are few: every
  // rank has all of them.
  int64_t scale_bytes;
};

const WeightRecipeRow& row_of(WeightRecipe recipe);

// Every recipe, in declaration order.
std::span<const WeightRecipeRow> all_weight_recipes();

// Whether GPUs multiply a matrix of this size as codes. Layers leave others plain.
constexpr bool is_quantizable(int64_t rows, int64_t columns) {
  return rows % 16 == 0 && columns % 16 == 0;
}

// nullopt for an unknown name.
std::optional<WeightRecipe> parse_weight_recipe(std::string_view name);

// Matrix products of a quantised weight.
enum class ProductForm : uint8_t {
  kQuantized,  // of codes
  kPlain,      // of numbers
};

}  // namespace fsdp
