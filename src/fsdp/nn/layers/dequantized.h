// The numbers of weights that are gathered as codes and scales.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/shard/quantized_weight.h"

namespace fsdp::nn {

// Codes times scales in fp32, rounded once to the type. A copy of the whole matrix.
at::Tensor dequantized(const QuantizedWeight& weight, at::ScalarType type);

// The parameter itself, or what its codes say, in its type.
at::Tensor numbers_of(const at::Tensor& parameter);

}  // namespace fsdp::nn
