// Lets a layer write its weight gradient where it is reduced from, instead of handing it over.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

// What a layer's backward asks for, inside that backward. Where `target` is defined the layer
// writes   target = beta * target + gradient   (beta is 0 or 1; with 0 the target is not read) and
// returns no gradient to autograd: no full-size gradient is allocated, and nothing is copied.
// Undefined: hand the gradient to autograd as usual (the parameter is not sharded, its gradients
// travel in another type, or its unit is used again later in this backward).
struct DirectGradient {
  at::Tensor target;
  double beta = 0.0;
};

DirectGradient direct_gradient(const at::Tensor& parameter);

}  // namespace fsdp
