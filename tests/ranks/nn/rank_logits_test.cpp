// The loss of logits of which each rank has a part, against that of all logits.
#include "fsdp/nn/layers/rank_logits.h"

#include <gtest/gtest.h>

#include "fsdp/nn/layers/cross_entropy.h"
#include "support/run_ranks.h"
#include "support/small_models.h"

namespace fsdp::nn::rank_logits_test {
namespace {

using testing::run_ranks;

constexpr int64_t kSequence = 8;

// In narrow types, too: computed in fp32, and gradients rounded once.
TEST(RankLogits, HaveTheLossOfAllLogits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const bool has_targets : {true, false}) {
      at::Tensor targets = testing::small_tokens(1, 0, 2, kSequence - 1);
      targets.narrow(1, 0, 3).fill_(kNoTarget);  // all places of the first rank, and more
      if (!has_targets) targets.fill_(kNoTarget);
      const auto input = [&] {
        const at::Tensor wave = at::sin(at::arange(2 * kSequence * 40, at::kFloat) * 0.7) * 9.0;
        return wave.view({2, kSequence, 40}).to(dtype);
      };
      const at::Tensor all = input().set_requires_grad(true);
      const at::Tensor expected = cross_entropy(all, targets);
      expected.backward();
      run_ranks(4, [&](World& world) {
        const Mesh mesh = world.mesh({.tp = 4});
        for (const auto& [part, dim] :
             {std::pair{LogitPart::kVocabulary, 2}, std::pair{LogitPart::kSequence, 1}}) {
          const auto own = [&](const at::Tensor& whole) {
            return whole.chunk(4, dim)[static_cast<size_t>(world.rank())];
          };
          const at::Tensor logits = own(input()).clone().set_requires_grad(true);
          const LogitRanks ranks{mesh.tp(), part};
          const at::Tensor loss = cross_entropy(logits, targets, ranks);
          EXPECT_EQ(loss.scalar_type(), at::kFloat);
          EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5);
          loss.backward();
          const double relative = dtype == at::kFloat ? 1e-5 : 0x1p-7;
          EXPECT_TRUE(at::allclose(logits.grad(), own(all.grad()), relative, 1e-7));
          EXPECT_TRUE(at::equal(whole_logits(logits, ranks), input()));
        }
      });
    }
}

}  // namespace
}  // namespace fsdp::nn::rank_logits_test
