// Language models on a CUDA device: the same first values and, but for rounding, the same losses
// and gradients as on the host.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "fsdp/nn/language_model.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "support/require.h"
#include "support/run_ranks.h"
#include "support/small_models.h"

namespace fsdp::language_model_device_test {
namespace {

using testing::small_loss;
using testing::small_models;
using testing::small_tokens;
using testing::SmallModel;

std::map<std::string, at::Tensor> gradients_of(LanguageModel& model, const at::Tensor& tokens) {
  small_loss(model, tokens).total.backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : model.named_parameters())
    if (item.value().grad().defined()) gradients[item.key()] = item.value().grad().cpu();
  return gradients;
}

TEST(LanguageModelOnDevice, ComputesWhatTheHostDoes) {
  FSDP_REQUIRE_GPU();
  for (const SmallModel& each : small_models()) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      const auto host = build_language_model(each.config, {.seed = 3});
      // Logits of five tokens at once.
      const auto device = build_language_model(
          each.config, {.seed = 3, .recompute = recompute, .logit_bytes = 5 * 37 * 4});
      testing::disturb(*host);
      testing::disturb(*device);
      device->to(at::kCUDA);
      const at::Tensor tokens = small_tokens(0, 0);
      const auto expected = gradients_of(*host, tokens);
      const auto actual = gradients_of(*device, tokens.cuda());
      ASSERT_EQ(actual.size(), expected.size()) << each.name;
      // fp32 products are exact to fp32 there, too: libtorch does not use TF32 unless asked.
      // Gradients that would be 0 without rounding, as those of key biases where there are no
      // positions, are below 1e-7.
      for (const auto& [name, value] : expected)
        EXPECT_LT((actual.at(name) - value).abs().max().item<double>(),
                  2e-5 * value.abs().max().item<double>() + 1e-7)
            << each.name << " " << name;
    }
  }
}

TEST(LanguageModelOnDevice, BeginsWithTheHostsValuesAndTrainsSharded) {
  FSDP_REQUIRE_GPU();
  for (const SmallModel& each : small_models()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const auto host = build_language_model(each.config, {.seed = 3, .dtype = dtype});
      testing::run_ranks(2, [&](World& world) {
        const std::shared_ptr<LanguageModel> model = [&] {
          const MetaConstruction without_memory;
          return build_language_model(each.config, {.seed = 3, .dtype = dtype});
        }();
        const Mesh mesh = world.mesh();
        const Sharded sharded = fully_shard(model, mesh,
                                            {.precision = {.main_storage = MainStorage::kSeparate},
                                             .device = at::Device(at::kCUDA, 0)});
        {
          const auto whole = sharded.full_parameters();
          const auto expected = host->named_parameters();
          for (const auto& item : model->named_parameters())
            EXPECT_TRUE(at::equal(item.value().cpu(), expected[item.key()]))
                << each.name << " " << item.key();
        }
        const at::Tensor tokens = small_tokens(world.rank(), 0).cuda();
        double first = 0.0;
        double last = 0.0;
        for (int step = 0; step < 8; ++step) {
          const ModelLoss loss = small_loss(*model, tokens);
          loss.total.backward();
          last = loss.terms[0].value.item<double>();
          if (step == 0) first = last;
          for (const FlatShard& shard : sharded.flat_shards())
            shard.main_weight.sub_(shard.gradient, 0.2);
          sharded.refresh_weights();
          sharded.zero_grad();
        }
        EXPECT_LT(last, first) << each.name;
      });
    }
  }
}

}  // namespace
}  // namespace fsdp::language_model_device_test
