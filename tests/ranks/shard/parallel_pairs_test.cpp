// ep and tp with everything else: strategies on one axis and two, types, narrow moments, offload,
// recomputation, pools and microbatches, so that any two of their values meet once.
#include <map>

#include "fsdp/optim/adamw.h"
#include "fsdp/shard/recompute.h"
#include "support/one_in.h"
#include "support/pairwise.h"
#include "support/parallel_training.h"

namespace fsdp::testing::parallel_pairs_test {
namespace {

using namespace parallel;

constexpr int kRanks = 4;

// Without tp, without ep, both; groups within a row, over rows, and none beside them.
constexpr std::array<MeshOptions, 6> kMeshes = {{{.outer = 1, .ep = 2, .tp = 2},
                                                 {.outer = 2, .ep = 2, .tp = 1},
                                                 {.outer = 2, .ep = 1, .tp = 2},
                                                 {.outer = 1, .ep = 4, .tp = 2},
                                                 {.outer = 2, .ep = 4, .tp = 2},
                                                 {.outer = 1, .ep = 2, .tp = 4}}};

constexpr std::array kStrategies = {"optim", "optim_grads", "optim_grads_params",
                                    "optim_grads+hfsdp", "optim_grads_params+hfsdp"};

constexpr std::array kPools = {PoolKind::kOnDemand, PoolKind::kDoubleBuffer, PoolKind::kMaxPool,
                               PoolKind::kPlanned};

struct Types {
  const char* name;
  PrecisionPolicy precision;
  double tolerance;  // of losses, norms and updates, relative
};

// bf16 has 8 bits: products of such activations are off by 1 %, and sums over ranks and tokens
// have another order, which rounds them to other neighbours.
const std::vector<Types> kTypes = {
    {"fp32", {}, 2e-4},
    {"bf16", {.params = at::kBFloat16, .main_grads = at::kFloat}, 0.03},
    {"bf16, separate, bf16 on the wire",
     {.params = at::kBFloat16,
      .main_storage = MainStorage::kSeparate,
      .main_grads = at::kFloat,
      .grad_comm = at::kBFloat16},
     0.03}};

struct Moments {
  const char* name;
  at::ScalarType first, second;
  double tolerance;  // of updates: half a step of the narrowest type, three times
};

const std::vector<Moments> kMoments = {{"fp32", at::kFloat, at::kFloat, 0.0},
                                       {"bf16", at::kBFloat16, at::kBFloat16, 0.006},
                                       {"fp8", at::kFloat8_e4m3fn, at::kHalf, 0.1}};

constexpr std::array kOffloads = {0.0, 0.5, 1.0};
constexpr std::array kMicrobatches = {1, 2};

enum class Recomputes : uint8_t { kNo, kYes };
constexpr std::array kRecomputes = {Recomputes::kNo, Recomputes::kYes};

using Pairs = Pairwise<8>;

struct Case {
  explicit Case(const Pairs::Choice& choice)
      : mesh(kMeshes[choice[0]]),
        strategy(kStrategies[choice[1]]),
        pool(kPools[choice[2]]),
        types(kTypes[choice[3]]),
        moments(kMoments[choice[4]]),
        offload(kOffloads[choice[5]]),
        microbatches(kMicrobatches[choice[6]]),
        recomputes(kRecomputes[choice[7]]) {}

  MeshOptions mesh;
  const char* strategy;
  PoolKind pool;
  Types types;
  Moments moments;
  double offload;
  int microbatches;
  Recomputes recomputes;

  int num_batches() const { return kRanks / mesh.tp * microbatches; }
  ShardOptions options() const {
    return {.strategy = parse_strategy(strategy),
            .precision = types.precision,
            .pool = pool,
            .offload = {.fraction = offload, .pin = false, .chunk_numel = 16}};
  }
  std::string text() const {
    return concat(parallel::text({kRanks, mesh}), ", ", strategy, ", ", name_of(pool), ", ",
                  types.name, ", moments ", moments.name, ", offload ", offload, ", ", microbatches,
                  " microbatches", recomputes == Recomputes::kYes ? ", recomputes" : "");
  }
};

at::Tensor forward(ParallelModel& model, const at::Tensor& x, Recomputes recomputes) {
  if (recomputes == Recomputes::kNo) return model(x);
  const auto units = [&](const at::Tensor& input) { return model->second(model->first(input)); };
  Scale& last = model->last;
  // The first unit's input must need a gradient, or nothing is recomputed for it.
  const at::Tensor hidden = recompute(units, x.detach().requires_grad_());
  return along<gathered, own_rows>(last->tp, last(along<own_rows, gathered>(last->tp, hidden)));
}

struct Result {
  std::vector<double> losses;  // by step, of this rank's batches
  std::vector<double> norms;
  Named weights;  // what this rank owns, in the main weights' type
};

// eps is as large as the gradients, so that updates are off by as much as these, relative.
constexpr double kLearningRate = 0.1;

Result train_case(const Mesh& mesh, const Case& with, const ShardOptions& options, int first_batch,
                  int num_batches) {
  Result result;
  ParallelModel model = parallel_model();
  const Sharded sharded = fully_shard(model, mesh, options);
  AdamW optimizer(sharded, {.lr = kLearningRate,
                            .eps = 1e-2,
                            .first_moment = with.moments.first,
                            .second_moment = with.moments.second,
                            .step = {.max_norm = 0.05, .measures_norm = true}});
  const at::ScalarType computes_in = options.precision.params.value_or(at::kFloat);
  for (int step = 0; step < kParallelSteps; ++step) {
    double sum = 0.0;
    for (int i = 0; i < num_batches; ++i) {
      sharded.microbatch({.last = i + 1 == num_batches});
      const at::Tensor x = input_for(first_batch + i, step, {kTokens, kHidden}).to(computes_in);
      const at::Tensor loss = forward(model, x, with.recomputes).to(at::kFloat).square().mean() /
                              static_cast<double>(num_batches);
      loss.backward();
      sum += loss.item<double>();
    }
    optimizer.step();
    result.losses.push_back(sum);
    result.norms.push_back(optimizer.gradient_norm());
    optimizer.zero_grad();
  }
  const auto whole = sharded.full_parameters();
  for (const auto& item : model->named_parameters())
    result.weights[item.key()] =
        item.value().detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  return result;
}

// Trains on one rank, without any axis; results are kept by number of batches, types and moments.
const Result& train_alone(const Case& with, std::map<std::string, Result>& known) {
  const std::string key = concat(with.num_batches(), " ", with.types.name, " ", with.moments.name);
  if (const auto it = known.find(key); it != known.end()) return it->second;
  run_ranks(1, [&](World& world) {
    Case alone = with;
    alone.recomputes = Recomputes::kNo;
    const Mesh mesh = world.mesh();
    known[key] =
        train_case(mesh, alone, {.precision = with.types.precision}, 0, with.num_batches());
  });
  return known.at(key);
}

TEST(ParallelPairs, TrainAsTheUnshardedModel) {
  std::map<std::string, Result> alone;
  const std::vector<Pairs::Choice> choices =
      Pairs({kMeshes.size(), kStrategies.size(), kPools.size(), kTypes.size(), kMoments.size(),
             kOffloads.size(), kMicrobatches.size(), kRecomputes.size()})
          .choices();
  EXPECT_LE(choices.size(), 60u);
  OneIn few(4);
  for (const Pairs::Choice& choice : choices) {
    if (few.skips()) continue;
    const Case with(choice);
    const std::string what = with.text();
    const Result& expected = train_alone(with, alone);
    const double tolerance = with.types.tolerance + with.moments.tolerance;
    std::mutex mutex;
    std::vector<double> losses(kParallelSteps, 0.0);
    run_ranks(kRanks, [&](World& world) {
      const Mesh mesh = world.mesh(with.mesh);
      const Result found =
          train_case(mesh, with, with.options(), mesh.data_parallel_rank() * with.microbatches,
                     with.microbatches);
      for (size_t step = 0; step < found.norms.size(); ++step)
        EXPECT_NEAR(found.norms[step], expected.norms[step], tolerance * expected.norms[step])
            << what << " step " << step;
      // Three steps of the rate, each off by so much of a step; and bf16 weights round once more.
      const double updates = kParallelSteps * kLearningRate * tolerance;
      const double rounding = with.types.precision.params ? 0.008 : 1e-5;
      for (const auto& [name, value] : found.weights)
        EXPECT_TRUE(at::allclose(value, owned_by(mesh, name, expected.weights.at(name)), rounding,
                                 0.5 * updates))
            << what << " " << name << "\n"
            << value << "\n"
            << owned_by(mesh, name, expected.weights.at(name));
      const std::lock_guard lock(mutex);
      for (size_t step = 0; step < losses.size(); ++step)
        losses[step] += found.losses[step] / kRanks;
    });
    for (size_t step = 0; step < losses.size(); ++step)
      EXPECT_NEAR(losses[step], expected.losses[step], tolerance * expected.losses[step])
          << what << " step " << step;
  }
}

}  // namespace
}  // namespace fsdp::testing::parallel_pairs_test
