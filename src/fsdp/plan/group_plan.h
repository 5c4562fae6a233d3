// The parameter groups of a model, laid out for a mesh: the element counts every forecast is made
// of.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/plan/model_shape.h"
#include "fsdp/plan/plan_options.h"

namespace fsdp {

// The dtypes of one group's buffers, resolved: no field is left to a default.
struct GroupTypes {
  DType weight;
  // nullopt: there is none, or it would equal the weight and aliases it.
  std::optional<DType> main_weight;
  DType main_grad;
  DType wire;
  std::optional<DType> moment;
  // Groups of whole numbers have neither gradients nor optimizer state.
  bool trainable = true;
};

GroupTypes resolve_types(DType weight, const PrecisionOptions& precision);

// One unit's tensors of one dtype.
struct GroupPlan {
  int64_t unit = 0;
  GroupTypes types;
  FlatLayout layout;
};

// In unit order. Reads ranks, precision and granularity; the strategy does not change the layout.
std::vector<GroupPlan> lay_out(const ModelShape& model, const PlanOptions& options);

}  // namespace fsdp
