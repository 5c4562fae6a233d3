// Lets a layer write its weight gradient straight into the buffer that is reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp {

// For a layer's backward. If `target` is defined, the layer writes   target = beta * target +
// gradient   (beta is 0 or 1; with 0 the target is not read) and returns no gradient to autograd:
// no full-size gradient is allocated, and nothing is copied. If `target` is undefined, the layer
// returns the gradient as usual (the parameter is not sharded, its gradients travel in a type the
// layer cannot write, or its unit is used again later in this backward).
struct DirectGradient {
  at::Tensor target;
  double beta = 0.0;
};

// The types that a layer can write.
enum class GradientType : uint8_t {
  kOfParameter,  // the parameter's own dtype
  kOrWider,  // or fp32 for a bf16 or fp16 parameter, as products of matrices on a GPU can: nothing
             // is rounded before it is summed
};

DirectGradient direct_gradient(const at::Tensor& parameter,
                               GradientType type = GradientType::kOfParameter);

}  // namespace fsdp
