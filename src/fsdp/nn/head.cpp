#include "fsdp/nn/head.h"

#include <ATen/ATen.h>

#include "fsdp/nn/linear.h"

namespace fsdp::nn {

at::Tensor last_position(const at::Tensor& hidden) {
  return hidden.narrow(1, hidden.size(1) - 1, 1);
}

HeadImpl::HeadImpl(const HeadOptions& options)
    : is_tied_(options.tied_weight.defined()),
      standard_deviation_(options.standard_deviation),
      norm_(register_module("norm", RmsNorm(options.hidden_size, options.norm_eps))) {
  weight =
      register_parameter("weight", is_tied_ ? options.tied_weight
                                            : at::empty({options.vocab_size, options.hidden_size}));
}

at::Tensor HeadImpl::forward(const at::Tensor& x, HeadInput input) {
  return nn::linear(input == HeadInput::kHidden ? norm_(x) : x, weight, at::Tensor());
}

void HeadImpl::reset_parameters() {
  if (!is_tied_) fill_normal(weight, "weight", standard_deviation_);
}

}  // namespace fsdp::nn
