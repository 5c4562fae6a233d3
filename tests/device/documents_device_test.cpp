// Packed documents on a CUDA device: by libtorch's kernels for sequences of unlike lengths in
// narrow types, document by document in others.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "fsdp/nn/language_model.h"
#include "support/require.h"
#include "support/small_models.h"

namespace fsdp::documents_device_test {
namespace {

constexpr int64_t kRows = 2;
constexpr int64_t kSequence = 12;
const std::vector<int64_t> kStarts = {0, 5, 6, 12, 16};

std::shared_ptr<const Documents> documents_on(at::Device device) {
  return std::make_shared<const Documents>(kStarts, kRows, kSequence, device);
}

at::Tensor some_tokens(int64_t phase) {
  return (at::arange(kRows * kSequence, at::kLong) * 7 + phase)
      .remainder(37)
      .view({kRows, kSequence});
}

std::vector<at::Tensor> gradients_on(at::Device device, at::ScalarType dtype,
                                     const ModelConfig& config) {
  const auto model = build_language_model(config, {.seed = 3, .dtype = dtype});
  model->to(device);
  model->loss(some_tokens(3).to(device), some_tokens(11).to(device), documents_on(device))
      .total.backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model->parameters())
    gradients.push_back(parameter.grad().cpu().to(at::kFloat));
  return gradients;
}

void expect_like_host(const ModelConfig& config, at::ScalarType dtype, double tolerance) {
  const auto expected = gradients_on(at::kCPU, at::kFloat, config);
  const auto actual = gradients_on(at::kCUDA, dtype, config);
  for (size_t i = 0; i < expected.size(); ++i) {
    const double scale = std::max(1e-3, expected[i].abs().max().item<double>());
    EXPECT_LT((actual[i] - expected[i]).abs().max().item<double>() / scale, tolerance) << i;
  }
}

// Two layers multiply roundings of fp32 (6e-8), or of bf16 (4e-3), some times.
TEST(DocumentsOnDevice, HaveTheGradientsOfTheHost) {
  FSDP_REQUIRE_GPU();
  expect_like_host(testing::small_llama(), at::kFloat, 2e-5);
  expect_like_host(testing::small_hybrid(), at::kFloat, 2e-5);
  expect_like_host(testing::small_llama(), at::kBFloat16, 0.1);
}

TEST(DocumentsOnDevice, SeeNothingOfEachOther) {
  FSDP_REQUIRE_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = build_language_model(testing::small_llama(), {.seed = 3, .dtype = dtype});
    model->to(at::kCUDA);
    const at::NoGradGuard no_grad;
    const auto documents = documents_on(at::kCUDA);
    const at::Tensor tokens = some_tokens(3).cuda();
    const auto before = documents->divided(model->logits(tokens, documents));
    tokens[0][0] = (tokens[0][0] + 1) % 37;
    const auto after = documents->divided(model->logits(tokens, documents));
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_EQ(after[i].equal(before[i]), i != 0) << i << " " << dtype;
  }
}

}  // namespace
}  // namespace fsdp::documents_device_test
