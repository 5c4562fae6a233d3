// The dtypes of a parameter group's buffers: engine and forecast resolve them here, so they agree.
#pragma once

#include <cstdint>
#include <optional>

#include "fsdp/base/dtype.h"

namespace fsdp {

// What the user says about types; docs/plan.md says which buffer each one sets.
struct PrecisionTypes {
  // Main weights. nullopt: none, the optimizer updates the weights themselves.
  std::optional<DType> main_params = DType::kFloat32;
  // Main gradients. nullopt: the parameter's dtype.
  std::optional<DType> main_grads = std::nullopt;
  // What gradients travel in. nullopt: the main gradients' dtype.
  std::optional<DType> grad_comm = std::nullopt;
  // Each of the optimizer's two moments. nullopt: none.
  std::optional<DType> moments = DType::kFloat32;

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
  std::optional<DType> moment;
  bool trainable = true;

  friend constexpr bool operator==(const GroupTypes&, const GroupTypes&) = default;
};

// Whole numbers are not trainable whatever `trainable` says.
GroupTypes resolve_types(DType weight, const PrecisionTypes& precision, Trainable trainable);

// FlatLayoutRequest::element_bytes of the group. All its buffers have the same layout in elements,
// so the narrowest one that exists decides how many elements make an aligned start. Moments never
// travel and may be unaligned.
int64_t narrowest_bytes(const GroupTypes& types);

}  // namespace fsdp
