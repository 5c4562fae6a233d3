// A layer's output and gradients, against those of a slow and obvious version of it.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

// Values without random numbers, of either sign.
inline at::Tensor waves(at::IntArrayRef shape, double phase, double size = 1.0) {
  int64_t numel = 1;
  for (const int64_t dim : shape) numel *= dim;
  const at::Tensor index = at::arange(numel, at::kDouble);
  return ((index * 1.7 + phase).sin() * size).to(at::kFloat).view(shape);
}

using TensorFunction = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// The output, and the gradients of a weighted sum of it.
inline std::vector<at::Tensor> output_and_gradients(const TensorFunction& function,
                                                    const std::vector<at::Tensor>& values,
                                                    at::ScalarType dtype) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& value : values)
    inputs.push_back(value.to(dtype).detach().clone().set_requires_grad(true));
  std::vector<at::Tensor> results = {function(inputs)};
  (results[0] * waves(results[0].sizes(), 0.3).to(dtype)).sum().backward();
  for (const at::Tensor& input : inputs) results.push_back(input.grad());
  return results;
}

// Against the same in fp64: differences are roundings, relative to the largest value.
inline void expect_near(const std::vector<at::Tensor>& actual,
                        const std::vector<at::Tensor>& expected, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double scale = std::max(1e-3, expected[i].abs().max().item<double>());
    const double error = (actual[i].to(at::kDouble) - expected[i]).abs().max().item<double>();
    EXPECT_LT(error / scale, tolerance)
        << what << (i == 0 ? ": output" : ": gradient of argument ") << i;
  }
}

}  // namespace fsdp::testing
