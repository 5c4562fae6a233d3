#include "fsdp/nn/layers/weight_gradient.h"

#include <ATen/ATen.h>

#include "fsdp/nn/kernels/kernel_calls.h"

namespace fsdp::nn {

void write_product(at::Tensor target, const at::Tensor& transposed, const at::Tensor& inputs,
                   ProductUse use) {
  const bool adds = use == ProductUse::kAdded;
  const at::ScalarType type = target.scalar_type();
  const bool widens = type != inputs.scalar_type();
  if (widens && inputs.is_cuda()) {  // the fp32 product of narrow matrices, which GPUs have
    if (adds)
      at::addmm_out(target, target, transposed, inputs, type);
    else
      at::mm_out(target, transposed, inputs, type);
    return;
  }
  const at::Tensor left = widens ? transposed.to(type) : transposed;
  const at::Tensor right = widens ? inputs.to(type) : inputs;
  if (adds)
    target.addmm_(left, right);
  else
    at::mm_out(target, left, right);
}

WeightGradient::WeightGradient(const at::Tensor& weight)
    : target_(direct_gradient(
          weight, weight.is_cuda() ? GradientType::kOrWider : GradientType::kOfParameter)) {
  if (!target_.target.defined()) target_.target = own_ = at::empty_like(weight);
}

void WeightGradient::write_rows(int64_t first, const at::Tensor& transposed,
                                const at::Tensor& inputs) {
  at::Tensor target = target_.target.narrow(0, first, transposed.size(0));
  const bool adds = target_.beta != 0.0;
  if (inputs.size(0) != 0)
    write_product(target, transposed, inputs, adds ? ProductUse::kAdded : ProductUse::kStored);
  else if (!adds)
    target.zero_();
}

void WeightGradient::write(const at::Tensor& values, const at::Tensor& factor) {
  if (target_.beta != 0.0)
    at::addcmul_out(target_.target, target_.target, values, factor);
  else
    at::mul_out(target_.target, values, factor);
}

void WeightGradient::write(const std::function<void(const at::Tensor& to)>& product) {
  const bool adds = target_.beta != 0.0;
  // Products of codes can neither add nor write everywhere.
  if (!adds && begins_a_pack(target_.target)) {
    product(target_.target);
    return;
  }
  const at::Tensor result = at::empty_like(target_.target);
  product(result);
  if (adds)
    target_.target.add_(result);
  else
    target_.target.copy_(result);
}

}  // namespace fsdp::nn
