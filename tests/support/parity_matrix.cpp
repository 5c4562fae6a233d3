#include "support/parity_matrix.h"

#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "support/pairwise.h"

namespace fsdp::testing {

namespace {

// The seven named ones, then unnamed ones: only weights sharded, everything over both axes,
// gradients over both axes and weights whole, ZeRO-3 with gradients over both axes.
constexpr std::array kStrategies = {"no_shard",
                                    "optim",
                                    "optim_grads",
                                    "optim_grads_params",
                                    "optim+hfsdp",
                                    "optim_grads+hfsdp",
                                    "optim_grads_params+hfsdp",
                                    "RS/PP/SS",
                                    "SS/SS/SS",
                                    "RR/SS/SS",
                                    "RS/PP/RS"};
constexpr std::array<std::pair<int, int>, 7> kMeshes = {
    {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1}, {2, 2}, {3, 1}}};
constexpr std::array kModels = {ModelKind::kMlp, ModelKind::kLlama, ModelKind::kHybrid};
constexpr std::array kPools = {PoolKind::kOnDemand, PoolKind::kDoubleBuffer, PoolKind::kMaxPool,
                               PoolKind::kPlanned};
constexpr std::array kMicrobatches = {1, 3};
constexpr std::array kPrecisions = {Precision::kFp32, Precision::kBf16, Precision::kBf16Wire,
                                    Precision::kBf16Grads, Precision::kBf16Alone};
constexpr std::array kLifetimes = {GradientLifetime::kPersistent, GradientLifetime::kStep};
constexpr std::array kGradients = {GradientOf::kMeanOverRanks, GradientOf::kSumOverRanks};

constexpr std::array kUpdatedBy = {UpdatedBy::kLibtorch, UpdatedBy::kOurs,
                                   UpdatedBy::kOursOffloaded};

constexpr size_t kNumProperties = 9;
// One index per property.
using Choice = Pairwise<kNumProperties>::Choice;

constexpr Choice kNumValues = {kStrategies.size(), kMeshes.size(),       kModels.size(),
                               kPools.size(),      kMicrobatches.size(), kPrecisions.size(),
                               kLifetimes.size(),  kGradients.size(),    kUpdatedBy.size()};

ParityCase case_of(const Choice& choice) {
  return {.model = kModels[choice[2]],
          .strategy = kStrategies[choice[0]],
          .outer = kMeshes[choice[1]].first,
          .inner = kMeshes[choice[1]].second,
          .pool = kPools[choice[3]],
          .microbatches = kMicrobatches[choice[4]],
          .precision = kPrecisions[choice[5]],
          .lifetime = kLifetimes[choice[6]],
          .gradient = kGradients[choice[7]],
          .updated_by = kUpdatedBy[choice[8]]};
}

std::vector<Choice> all_choices() {
  std::vector<Choice> all{{}};
  for (size_t property = 0; property < kNumProperties; ++property) {
    std::vector<Choice> longer;
    for (const Choice& choice : all)
      for (size_t value = 0; value < kNumValues[property]; ++value) {
        longer.push_back(choice);
        longer.back()[property] = value;
      }
    all = std::move(longer);
  }
  return all;
}

}  // namespace

std::vector<ParityCase> all_cases() {
  std::vector<ParityCase> cases;
  for (const Choice& choice : all_choices()) cases.push_back(case_of(choice));
  return cases;
}

std::vector<ParityCase> pairwise_cases() {
  std::vector<ParityCase> cases;
  for (const Choice& choice : Pairwise<kNumProperties>(kNumValues).choices())
    cases.push_back(case_of(choice));
  return cases;
}

std::vector<ParityCase> cases_to_run() {
  const char* full = std::getenv("FSDP_FULL");
  return full != nullptr && std::string_view(full) == "1" ? all_cases() : pairwise_cases();
}

}  // namespace fsdp::testing
