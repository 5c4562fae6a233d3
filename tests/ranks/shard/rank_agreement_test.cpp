// Ranks that shard another model, with other options, or make another optimizer: all of them throw
// at once, and none waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <set>
#include <utility>

#include "fsdp/optim/adamw.h"
#include "fsdp/optim/sgd.h"
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

TEST(ShardOptions, ThatDifferOnOneRankAreShownByAllRanks) {
  using Change = std::function<void(ShardOptions&)>;
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](auto& o) { o.strategy = Strategy::optim; },
       "strategy 'optim' and rank 0 has 'optim_grads_params'"},
      {[](auto& o) { o.precision.main_params = at::kDouble; },
       "precision.main_params 'Double' and rank 0 has 'Float'"},
      {[](auto& o) { o.precision.main_storage = MainStorage::kSeparate; },
       "precision.main_storage 'separate' and rank 0 has 'split'"},
      {[](auto& o) { o.precision.main_grads = at::kFloat; },
       "precision.main_grads 'Float' and rank 0 has 'nullopt'"},
      {[](auto& o) { o.precision.grad_comm = at::kBFloat16; },
       "precision.grad_comm 'BFloat16' and rank 0 has 'nullopt'"},
      {[](auto& o) { o.pool = PoolKind::kPlanned; }, "pool 'planned' and rank 0 has 'max_pool'"},
      {[](auto& o) { o.prefetch = 2; }, "prefetch '2' and rank 0 has '1'"},
      {[](auto& o) { o.pool_budget_bytes = 4096; }, "pool_budget_bytes '4096' and rank 0 has '0'"},
      {[](auto& o) { o.on_move = OnMove::kRefuse; }, "on_move 'kRefuse' and rank 0 has 'kFollow'"},
      {[](auto& o) { o.other_units = OtherUnits::kPersistent; },
       "other_units 'kPersistent' and rank 0 has 'kOnDemand'"},
      {[](auto& o) { o.gradient = GradientOf::kSumOverRanks; },
       "gradient 'kSumOverRanks' and rank 0 has 'kMeanOverRanks'"},
      {[](auto& o) { o.gradient_lifetime = GradientLifetime::kStep; },
       "gradient_lifetime 'kStep' and rank 0 has 'kPersistent'"},
      {[](auto& o) { o.report_nan = ReportNan::kPerParameter; },
       "report_nan 'kPerParameter' and rank 0 has 'kOff'"},
      {[](auto& o) { o.collectives = Collectives::kAlways; },
       "collectives 'kAlways' and rank 0 has 'kBetweenRanks'"},
      {[](auto& o) { o.granularity = Granularity::row(); },
       "granularity 'row' and rank 0 has 'element'"},
      {[](auto& o) { o.initial_values = InitialValues::kOfRankZero; },
       "initial_values 'kOfRankZero' and rank 0 has 'kOfEveryRank'"},
      {[](auto& o) {
         o.expert_parameters = {"*.linear.*", "*.bias"};
       },
       "expert_parameters '*.linear.*, *.bias' and rank 0 has ''"},
      {[](auto& o) {
         o.tensor_parameters = {{"*.bias", TpPartial{}}, {"*", TpShard{.dim = 1}}};
       },
       "tensor_parameters '*.bias partial over tp, * cut over tp along dim 1' and rank 0 has ''"},
      {[](auto& o) { o.device = c10::Device(c10::kCUDA, 0); },
       "device 'cuda' and rank 0 has 'cpu'"},
  };
  for (const auto& [change, expected] : cases)
    EXPECT_EQ(words_with(change), "rank 2 has " + expected + kSameOptions);
  EXPECT_THAT(words_with([](auto& o) { o.user_buffers = static_cast<UserBuffers>(1); }),
              ::testing::StartsWith("rank 2 has user_buffers '"));
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
  EXPECT_EQ(words_for([](Chain& model) { model->to(at::kDouble); }, 2),
            "rank 2 has parameter 0 'unit0.linear.weight Double [7, 5] of unit unit0' and rank 0 "
            "has 'unit0.linear.weight Float [7, 5] of unit unit0'" +
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
  for (const int odd : {1, 4, 5}) {
    const std::set<std::string> words = words_of(6, [&](World& world) {
      const Mesh mesh = world.mesh({.outer = 3});
      Chain model = build([] { return Chain(2); });
      fully_shard(model, mesh, {.prefetch = world.rank() == odd ? 2 : 1});
    });
    EXPECT_EQ(words, std::set<std::string>{"rank " + std::to_string(odd) +
                                           " has prefetch '2' and rank 0 has '1'" + kSameOptions});
  }
}

// --- optimizers ----------------------------------------------------------------------------------

const std::string kSameOptimizer = "; make the optimizer with the same options on every rank";

template <typename Optimizer, typename Options>
std::string words_with(const std::function<void(Options&)>& change) {
  const std::set<std::string> words = words_of(kRanks, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = build([] { return Chain(2); });
    const Sharded sharded = fully_shard(model, mesh);
    Options options;
    if (world.rank() == kOddRank) change(options);
    Optimizer(sharded, options);
  });
  EXPECT_EQ(words.size(), 1) << "every rank says the same";
  return *words.begin();
}

TEST(OptimizerOptions, ThatDifferOnOneRankAreShownByAllRanks) {
  using Change = std::function<void(AdamWOptions&)>;
  const std::vector<std::pair<Change, std::string>> cases = {
      // One bit of a number is a difference.
      {[](auto& o) { o.lr = 0.0010000000000000002; },
       "lr '0.0010000000000000002' and rank 0 has '0.001'"},
      {[](auto& o) { o.beta1 = 0.8; }, "beta1 '0.8' and rank 0 has '0.9'"},
      {[](auto& o) { o.beta2 = 0.95; }, "beta2 '0.95' and rank 0 has '0.999'"},
      {[](auto& o) { o.eps = 1e-6; }, "eps '1e-06' and rank 0 has '1e-08'"},
      {[](auto& o) { o.weight_decay = 0.1; }, "weight_decay '0.1' and rank 0 has '0.01'"},
      {[](auto& o) { o.decay_spares_vectors = false; },
       "decay_spares_vectors 'false' and rank 0 has 'true'"},
      {[](auto& o) { o.first_moment = at::kBFloat16; },
       "moment exp_avg 'bf16' and rank 0 has 'fp32'"},
      {[](auto& o) { o.second_moment = at::kBFloat16; },
       "moment exp_avg_sq 'bf16' and rank 0 has 'fp32'"},
      {[](auto& o) { o.rules = {{.pattern = "*.bias", .weight_decay = 0.5, .rate_scale = 2}}; },
       "rules[0] '*.bias weight_decay 0.5 rate_scale 2' and rank 0 has none"},
      {[](auto& o) { o.step.max_norm = 1; }, "step.max_norm '1' and rank 0 has '0'"},
      {[](auto& o) { o.step.measures_norm = true; },
       "step.measures_norm 'true' and rank 0 has 'false'"},
      {[](auto& o) { o.step.on_nonfinite = OnNonfinite::kSkip; },
       "step.on_nonfinite 'kSkip' and rank 0 has 'kUpdate'"},
      {[](auto& o) { o.step.loss_scale.initial = 8; },
       "step.loss_scale.initial '8' and rank 0 has '1'"},
      {[](auto& o) { o.step.loss_scale.backoff = 0.5; },
       "step.loss_scale.backoff '0.5' and rank 0 has '1'"},
      {[](auto& o) { o.step.loss_scale.growth = 2; },
       "step.loss_scale.growth '2' and rank 0 has '1'"},
      {[](auto& o) { o.step.loss_scale.interval = 7; },
       "step.loss_scale.interval '7' and rank 0 has '2000'"},
      {[](auto& o) { o.step.updates = Updates::kBlocking; },
       "step.updates 'kBlocking' and rank 0 has 'kHidden'"},
      {[](auto& o) { o.step.rounding = Rounding::kStochastic; },
       "step.rounding 'kStochastic' and rank 0 has 'kNearest'"},
      {[](auto& o) { o.step.seed = 3; }, "step.seed '3' and rank 0 has '0'"},
  };
  for (const auto& [change, expected] : cases)
    EXPECT_EQ((words_with<AdamW, AdamWOptions>(change)), "rank 2 has " + expected + kSameOptimizer);

  const auto sgd = [](const std::function<void(SGDOptions&)>& change) {
    return words_with<SGD, SGDOptions>(change);
  };
  EXPECT_EQ(sgd([](auto& o) { o.nesterov = true, o.momentum = 0.5; }),
            "rank 2 has momentum '0.5' and rank 0 has '0'" + kSameOptimizer);
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
