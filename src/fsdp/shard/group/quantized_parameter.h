// Ties a parameter to the codes and scales that stand for its numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "fsdp/shard/quantized_weight.h"

namespace fsdp {

// From now on quantized_weight(parameter) is what `current` returns; nullptr: nullopt again. A tag
// of the tensor itself, so that layers find it in their backward, too.
void tag_quantized(const at::Tensor& parameter, std::function<QuantizedWeight()> current);

}  // namespace fsdp
