// Ranks that shard another model, with other options, or make another optimizer: all of them throw
// at once, and none waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <set>
#include <utility>

#include "fsdp/base/text.h"
#include "fsdp/comm/rank_facts.h"
#include "fsdp/optim/option_fields.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"

namespace fsdp::rank_agreement_test {
namespace {

using testing::build;
using testing::Chain;
using testing::error_of;
using testing::run_ranks;

constexpr int kRanks = 3;
constexpr int kOddRank = 2;

// The messages of all ranks if `body(world)` throws.
std::set<std::string> words_of(int ranks, const std::function<void(World&)>& body) {
  std::mutex mutex;
  std::set<std::string> words;
  run_ranks(ranks, [&](World& world) {
    std::string mine = error_of([&] { body(world); });
    const std::lock_guard lock(mutex);
    words.insert(std::move(mine));
  });
  return words;
}

// --- fully_shard() -------------------------------------------------------------------------------

const std::string kSameOptions =
    "; call fully_shard() with the same model and options on every rank";

std::string words_with(const std::function<void(ShardOptions&)>& change) {
  const std::set<std::string> words = words_of(kRanks, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = build([] { return Chain(2); });
    ShardOptions options;
    if (world.rank() == kOddRank) change(options);
    fully_shard(model, mesh, options);
  });
  EXPECT_EQ(words.size(), 1) << "every rank says the same";
  return *words.begin();
}

// The facts that a change of options changes: "prefetch 2".
template <typename Options>
std::string changed_facts(const std::function<void(Options&)>& change) {
  Options options;
  const RankFacts before = option_facts(options);
  change(options);
  const RankFacts after = option_facts(options);
  std::string text;
  for (size_t i = 0; i < after.size(); ++i)
    if (after[i] != before[i]) text += after[i].first + " " + after[i].second;
  return text;
}

template <typename Options>
std::string names_of_facts() {
  Options options;
  std::vector<std::string> names;
  for (const auto& [name, value] : option_facts(options)) names.push_back(name);
  return join(names, " ");
}

TEST(ShardOptions, HaveAFactForEveryFieldThatMustNotDiffer) {
  EXPECT_EQ(names_of_facts<ShardOptions>(),
            "strategy units expert_parameters tensor_parameters precision.params "
            "precision.main_params precision.main_storage precision.main_grads "
            "precision.grad_comm quantization.recipe quantization.except "
            "quantization.weight_gradient quantization.frozen pool prefetch pool_budget_bytes "
            "on_move other_units "
            "user_buffers gradient lanes gradient_lifetime report_nan collectives granularity "
            "matrices.declared matrices.named matrices.except initial_values device");
  const std::vector<std::pair<std::function<void(ShardOptions&)>, std::string>> cases = {
      {[](auto& o) { o.precision.main_params = at::kDouble; }, "precision.main_params fp64"},
      {[](auto& o) { o.quantization.recipe = WeightRecipe::kMxFp8; }, "quantization.recipe mxfp8"},
      {[](auto& o) { o.granularity = Granularity::row(); }, "granularity row"},
      {[](auto& o) {
         o.matrices.named = {{.pattern = "a", .rows = {2, 3}}};
       },
       "matrices.named a of rows [2, 3]"},
      {[](auto& o) {
         o.expert_parameters.assign({"*.linear.*", "*.bias"});
       },
       "expert_parameters *.linear.*, *.bias"},
      {[](auto& o) {
         o.tensor_parameters.assign({{"*.bias", TpPartial{}}, {"*", TpShard{1}}});
       },
       "tensor_parameters *.bias partial over tp, * cut over tp along dim 1"},
      {[](auto& o) { o.device = c10::Device(c10::kCUDA, 1); }, "device cuda"}};
  for (const auto& [change, expected] : cases) EXPECT_EQ(changed_facts(change), expected);
}

TEST(ShardOptions, ThatDifferOnOneRankAreShownByAllRanks) {
  EXPECT_EQ(words_with([](auto& o) { o.device = c10::Device(c10::kCUDA, 0); }),
            "rank 2 has device 'cuda' and rank 0 has 'cpu'" + kSameOptions);
  // Wrong on one rank only: the others must not wait for it.
  EXPECT_EQ(words_with([](auto& o) { o.prefetch = -1; }),
            "rank 2 has prefetch '-1' and rank 0 has '1'" + kSameOptions);
}

TEST(ShardOptions, MayDifferInWhereMemoryIs) {
  HostSlabAllocator host;
  EXPECT_EQ(words_with([&](auto& o) {
              o.device = c10::Device(c10::kCPU);
              o.allocator = o.host_allocator = &host;
              o.offload.fraction = 0.5;
            }),
            "");
}

TEST(Model, ThatDiffersOnOneRankIsShownByAllRanks) {
  const auto words_for = [](const std::function<void(Chain&)>& change, int odd_units) {
    const std::set<std::string> words = words_of(kRanks, [&](World& world) {
      const Mesh mesh = world.mesh();
      const bool is_odd = world.rank() == kOddRank;
      Chain model = build([&] { return Chain(is_odd ? odd_units : 2); });
      if (is_odd) change(model);
      fully_shard(model, mesh);
    });
    EXPECT_EQ(words.size(), 1) << "every rank says the same";
    return *words.begin();
  };
  const auto as_it_is = [](Chain&) {};
  EXPECT_EQ(
      words_for(as_it_is, 3),
      "rank 2 has parameter 2 'unit1.linear.weight Float [7, 7] of unit unit1' and rank 0 has "
      "'unit1.linear.weight Float [3, 7] of unit unit1'" +
          kSameOptions);
  EXPECT_EQ(
      words_for([](Chain& model) { model->units[1]->linear->bias.set_requires_grad(false); }, 2),
      "rank 2 has parameter 3 'unit1.linear.bias Float [3] frozen of unit unit1' and rank 0 "
      "has 'unit1.linear.bias Float [3] of unit unit1'" +
          kSameOptions);
  EXPECT_EQ(words_for([](Chain& model) { model->register_parameter("more", at::ones({4})); }, 2),
            "rank 2 has parameter 4 'more Float [4] outside any unit' and rank 0 has none" +
                kSameOptions);
}

TEST(Ranks, AreNumberedAsInTheWorldWhateverTheMesh) {
  const std::set<std::string> words = words_of(6, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = 3});
    Chain model = build([] { return Chain(2); });
    fully_shard(model, mesh, {.prefetch = world.rank() == 4 ? 2 : 1});
  });
  EXPECT_EQ(words,
            std::set<std::string>{"rank 4 has prefetch '2' and rank 0 has '1'" + kSameOptions});
}

// --- optimizers ----------------------------------------------------------------------------------

const std::string kSameOptimizer = "; make the optimizer with the same options on every rank";

TEST(OptimizerOptions, HaveAFactForEveryField) {
  EXPECT_EQ(names_of_facts<AdamWOptions>(),
            "lr beta1 beta2 eps weight_decay decay_spares_vectors rules first_moment "
            "second_moment step.max_norm step.measures_norm step.on_nonfinite step.loss_scale "
            "step.loss_scale.interval step.updates step.without_gradient step.rounding step.seed "
            "step.marks_changes");
  const std::vector<std::pair<std::function<void(AdamWOptions&)>, std::string>> cases = {
      // One bit of a number is a difference.
      {[](auto& o) { o.lr = 0.0010000000000000002; }, "lr 0.0010000000000000002"},
      {[](auto& o) { o.rules = {{.pattern = "*.bias", .weight_decay = 0.5, .rate_scale = 2}}; },
       "rules *.bias decay=0.5 rate=2"},
      {[](auto& o) { o.step.loss_scale.initial = 8; }, "step.loss_scale 8"},
      {[](auto& o) { o.step.loss_scale.backoff = 0.5; },
       "step.loss_scale dynamic:1 times 0.5 or 1"},
      {[](auto& o) { o.step.loss_scale = LossScale::dynamic(8); }, "step.loss_scale dynamic:8"}};
  for (const auto& [change, expected] : cases) EXPECT_EQ(changed_facts(change), expected);
  EXPECT_EQ(changed_facts<MuonOptions>([](auto& o) { o.products_dtype = at::kFloat; }),
            "products_dtype fp32");
}

TEST(OptimizerOptions, ThatDifferOnOneRankAreShownByAllRanks) {
  const std::set<std::string> words = words_of(kRanks, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = build([] { return Chain(2); });
    const Sharded sharded = fully_shard(model, mesh);
    AdamW(sharded, {.beta1 = world.rank() == kOddRank ? 0.8 : 0.9});
  });
  EXPECT_EQ(words,
            std::set<std::string>{"rank 2 has beta1 '0.8' and rank 0 has '0.9'" + kSameOptimizer});
}

TEST(Optimizers, OfTwoKindsAreADifference) {
  const std::set<std::string> words = words_of(kRanks, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = build([] { return Chain(2); });
    const Sharded sharded = fully_shard(model, mesh);
    if (world.rank() == kOddRank)
      SGD(sharded, {.lr = 1e-3});
    else
      AdamW(sharded, {.lr = 1e-3});
  });
  EXPECT_EQ(words, std::set<std::string>{"rank 2 has optimizer 'SGD' and rank 0 has 'AdamW'" +
                                         kSameOptimizer});
}

}  // namespace
}  // namespace fsdp::rank_agreement_test
