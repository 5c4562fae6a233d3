#include "fsdp/layout/group_types.h"

#include <algorithm>

namespace fsdp {

namespace {

// Gradients of quantised weights are not quantised.
DType gradient_dtype_of(DType weight) {
  return element_bytes(weight) == 1 ? DType::kBFloat16 : weight;
}

}  // namespace

GroupTypes resolve_types(DType weight, const PrecisionTypes& precision, Trainable trainable) {
  GroupTypes types{weight, std::nullopt, weight,
                   weight, std::nullopt, trainable == Trainable::kYes && is_floating(weight)};
  if (!types.trainable) return types;
  if (precision.main_params != weight) types.main_weight = precision.main_params;
  types.main_grad = precision.main_grads.value_or(gradient_dtype_of(weight));
  types.wire = precision.grad_comm.value_or(types.main_grad);
  types.moment = precision.moments;
  return types;
}

int64_t narrowest_bytes(const GroupTypes& types) {
  int64_t bytes = element_bytes(types.weight);
  if (types.main_weight) bytes = std::min(bytes, element_bytes(*types.main_weight));
  if (types.trainable)
    bytes = std::min({bytes, element_bytes(types.main_grad), element_bytes(types.wire)});
  return bytes;
}

}  // namespace fsdp
