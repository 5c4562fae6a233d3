// The models that planning knows by name.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fsdp/plan/model_shape.h"

namespace fsdp {

// In catalog order.
std::vector<std::string> model_names();

// Throws UsageError with the nearest name when there is no such model.
ModelShape model_by_name(std::string_view name);

}  // namespace fsdp
