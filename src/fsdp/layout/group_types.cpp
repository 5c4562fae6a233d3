#include "fsdp/layout/group_types.h"

#include <algorithm>
#include <array>

namespace fsdp {

namespace {

constexpr std::array<MainStorage, 2> kMainStorages = {MainStorage::kSeparate, MainStorage::kSplit};

// Bytes, of every tensor and every shard.

// The signed 16-bit number that completes the upper half of an fp32 number.
constexpr int64_t kRemainderBytes = 2;

// Gradients of quantised weights are not quantised.
DType gradient_dtype_of(DType weight) {
  return element_bytes(weight) == 1 ? DType::kBFloat16 : weight;
}

// The one pair in which the weight is a prefix of the main weight.
bool can_split(const GroupTypes& types) {
  return types.weight == DType::kBFloat16 && types.main_weight == DType::kFloat32;
}

}  // namespace

std::string_view name_of(MainStorage storage) {
  switch (storage) {
    case MainStorage::kSeparate:
      return "separate";
    case MainStorage::kSplit:
      return "split";
  }
  return "";
}

std::span<const MainStorage> all_main_storages() { return kMainStorages; }

GroupTypes resolve_types(DType weight, const PrecisionTypes& precision, Trainable trainable,
                         WeightRecipe recipe) {
  GroupTypes types{.weight = weight,
                   .main_weight = std::nullopt,
                   .main_grad = weight,
                   .wire = weight,
                   .first_moment = std::nullopt,
                   .second_moment = std::nullopt,
                   .trainable = trainable == Trainable::kYes && is_floating(weight)};
  if (!types.trainable) {
    if (is_floating(weight)) types.recipe = recipe;
    return types;
  }
  if (precision.main_params != weight) types.main_weight = precision.main_params;
  if (recipe == WeightRecipe::kPlain) {
    types.split = precision.main_storage == MainStorage::kSplit && can_split(types);
  } else {
    types.recipe = recipe;
    types.main_weight = DType::kFloat32;
  }
  types.main_grad = precision.main_grads.value_or(gradient_dtype_of(weight));
  types.wire = precision.grad_comm.value_or(types.main_grad);
  types.first_moment = precision.first_moment;
  types.second_moment = precision.second_moment;
  return types;
}

int64_t main_weight_bytes(const GroupTypes& types) {
  if (!types.main_weight) return 0;
  return types.split ? kRemainderBytes : element_bytes(*types.main_weight);
}

int64_t narrowest_bytes(const GroupTypes& types) {
  int64_t bytes = types.is_quantized() ? 1 : element_bytes(types.weight);
  if (types.main_weight) bytes = std::min(bytes, main_weight_bytes(types));
  if (types.trainable)
    bytes = std::min({bytes, element_bytes(types.main_grad), element_bytes(types.wire)});
  return bytes;
}

}  // namespace fsdp
