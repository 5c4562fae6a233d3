// Layers on a CUDA device against formulas in fp64 of the same inputs.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/nn/kernels/layer_kernels.h"
#include "support/require.h"

#define FSDP_REQUIRE_DEVICE_LAYERS() \
  FSDP_REQUIRE_GPU();                \
  if (!has_device_layers()) GTEST_SKIP() << "built without CUDA kernels"

namespace fsdp::nn::device_layers {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

inline constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

// The largest error of a rounding to nearest, as a part of the number.
inline double half_unit(at::ScalarType type) {
  if (type == at::kBFloat16) return 0x1p-8;
  return type == at::kHalf ? 0x1p-11 : 0x1p-24;
}

inline at::Tensor numbers(at::IntArrayRef shape, at::ScalarType type, double size = 1.0) {
  return (at::randn(shape, at::device(at::kCUDA).dtype(at::kFloat)) * size).to(type);
}

// The outputs, and the gradients of the inputs for these gradients of the outputs.
inline Tensors outputs_and_gradients(const Function& function, const Tensors& values,
                                     const Tensors& output_gradients) {
  Tensors inputs;
  for (const at::Tensor& value : values) inputs.push_back(value.detach().set_requires_grad(true));
  Tensors results = function(inputs);
  at::Tensor sum;
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor part = (results[i].to(at::kDouble) * output_gradients[i]).sum();
    sum = sum.defined() ? sum + part : part;
  }
  sum.backward();
  for (at::Tensor& result : results) result = result.detach();
  for (const at::Tensor& input : inputs) results.push_back(input.grad());
  return results;
}

inline Tensors in_double(const Tensors& tensors) {
  Tensors wide;
  for (const at::Tensor& tensor : tensors) wide.push_back(tensor.to(at::kDouble));
  return wide;
}

// Rounded once; `slack` is what else an element may be wrong by.
inline void expect_rounded(const at::Tensor& actual, const at::Tensor& expected,
                           const at::Tensor& slack, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.numel() == 0) return;
  constexpr double kHalfSubnormal = 0x1p-25;  // of fp16
  const at::Tensor bound = expected.abs() * half_unit(actual.scalar_type()) + slack +
                           (actual.scalar_type() == at::kHalf ? kHalfSubnormal : 0.0);
  const at::Tensor error = (actual.to(at::kDouble) - expected).abs();
  EXPECT_TRUE(actual.isfinite().all().item<bool>()) << what;
  EXPECT_LE((error - bound).max().item<double>(), 0.0)
      << what << ", " << actual.sizes() << " of " << actual.scalar_type() << ", largest error "
      << error.max().item<double>() << " of " << expected.abs().max().item<double>();
}

inline void expect_same_again(const Function& function, const Tensors& values,
                              const Tensors& output_gradients, const std::string& what) {
  const Tensors first = outputs_and_gradients(function, values, output_gradients);
  for (int again = 0; again < 3; ++again) {
    const Tensors second = outputs_and_gradients(function, values, output_gradients);
    for (size_t i = 0; i < first.size(); ++i)
      EXPECT_TRUE(at::equal(first[i], second[i])) << what << " " << i;
  }
}

}  // namespace fsdp::nn::device_layers
