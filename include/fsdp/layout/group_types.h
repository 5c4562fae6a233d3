// The dtypes of a parameter group's buffers: engine and forecast resolve them here, so they agree.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "fsdp/base/dtype.h"
#include "fsdp/base/weight_recipe.h"

namespace fsdp {

// Where fp32 main weights of bf16 weights are; other pairs of types are always separate.
enum class MainStorage : uint8_t {
  kSeparate,  // whole, beside the weights
  // The weights are their upper halves, and beside them lie only the 16 bits that are missing.
  kSplit,
};

// "separate", "split".
std::string_view name_of(MainStorage storage);

// Every value, in declaration order.
std::span<const MainStorage> all_main_storages();

// The user's choice of types; docs/plan.md says which buffer each one sets.
struct PrecisionTypes {
  // Main weights. nullopt: none, the optimizer updates the weights themselves.
  std::optional<DType> main_params = DType::kFloat32;
  // How they are stored beside weights of another type.
  MainStorage main_storage = MainStorage::kSplit;
  // Main gradients. nullopt: the parameter's dtype.
  std::optional<DType> main_grads = std::nullopt;
  // The type that gradients travel in. nullopt: the main gradients' dtype.
  std::optional<DType> grad_comm = std::nullopt;
  // The optimizer's running averages: of gradients (SGD: the momentum), and of their squares.
  // nullopt: none. AdamW has both, SGD the first or none.
  std::optional<DType> first_moment = DType::kFloat32;
  std::optional<DType> second_moment = DType::kFloat32;

  friend constexpr bool operator==(const PrecisionTypes&, const PrecisionTypes&) = default;
};

enum class Trainable : uint8_t { kNo, kYes };

// Resolved: no field is left to a default. Groups that are frozen or of whole numbers have neither
// gradients nor optimizer state; their other types are the weight's and describe no buffer.
struct GroupTypes {
  DType weight;
  // nullopt: there is none, or it would equal the weight and aliases it.
  std::optional<DType> main_weight;
  DType main_grad;
  DType wire;
  std::optional<DType> first_moment;
  std::optional<DType> second_moment;
  bool trainable = true;
  // The weight is the upper half of main_weight, of which only the rest is stored.
  bool split = false;
  // Other than kPlain: what is gathered is codes and scales (layout/state_bytes.h); `weight` is
  // the type of the products' results and of gradients.
  WeightRecipe recipe = WeightRecipe::kPlain;

  bool is_quantized() const { return recipe != WeightRecipe::kPlain; }

  friend constexpr bool operator==(const GroupTypes&, const GroupTypes&) = default;
};

// Whole numbers are not trainable whatever `trainable` says. Quantised weights are made of whole
// fp32 main weights, which frozen ones lose when they are loaded.
GroupTypes resolve_types(DType weight, const PrecisionTypes& precision, Trainable trainable,
                         WeightRecipe recipe = WeightRecipe::kPlain);

// Bytes per element that main weights take beside the weights: 0 where there are none.
int64_t main_weight_bytes(const GroupTypes& types);

// FlatLayoutRequest::element_bytes of the group. All its buffers have the same layout in elements,
// so the narrowest one that exists decides how many elements make an aligned start. Moments never
// travel and may be unaligned.
int64_t narrowest_bytes(const GroupTypes& types);

}  // namespace fsdp
