#include "support/parity_matrix.h"

#include <array>
#include <cstdlib>
#include <set>
#include <string_view>
#include <utility>

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
constexpr std::array kPrecisions = {Precision::kFp32, Precision::kBf16, Precision::kBf16Wire};
constexpr std::array kLifetimes = {GradientLifetime::kPersistent, GradientLifetime::kStep};
constexpr std::array kGradients = {GradientOf::kMeanOverRanks, GradientOf::kSumOverRanks};

constexpr std::array kUpdatedBy = {UpdatedBy::kLibtorch, UpdatedBy::kOurs,
                                   UpdatedBy::kOursOffloaded};

constexpr size_t kNumProperties = 9;
constexpr std::array<size_t, kNumProperties> kNumValues = {
    kStrategies.size(), kMeshes.size(),       kModels.size(),
    kPools.size(),      kMicrobatches.size(), kPrecisions.size(),
    kLifetimes.size(),  kGradients.size(),    kUpdatedBy.size()};

// One index per property.
using Choice = std::array<size_t, kNumProperties>;

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

using ValuePair = std::array<size_t, 4>;  // property, value, later property, its value

template <typename Visit>
void for_each_pair(const Choice& choice, const Visit& visit) {
  for (size_t a = 0; a < kNumProperties; ++a)
    for (size_t b = a + 1; b < kNumProperties; ++b) visit(ValuePair{a, choice[a], b, choice[b]});
}

size_t num_new_pairs(const Choice& choice, const std::set<ValuePair>& missing) {
  size_t count = 0;
  for_each_pair(choice, [&](const ValuePair& pair) { count += missing.count(pair); });
  return count;
}

// Takes for each property in turn the value that adds the most new pairs, until nothing changes.
Choice improved(Choice choice, const std::set<ValuePair>& missing) {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t property = 0; property < kNumProperties; ++property)
      for (size_t value = 0; value < kNumValues[property]; ++value) {
        Choice other = choice;
        other[property] = value;
        if (num_new_pairs(other, missing) <= num_new_pairs(choice, missing)) continue;
        choice = other;
        changed = true;
      }
  }
  return choice;
}

}  // namespace

std::vector<ParityCase> all_cases() {
  std::vector<ParityCase> cases;
  for (const Choice& choice : all_choices()) cases.push_back(case_of(choice));
  return cases;
}

std::vector<ParityCase> pairwise_cases() {
  std::set<ValuePair> missing;
  for (const Choice& choice : all_choices())
    for_each_pair(choice, [&](const ValuePair& pair) { missing.insert(pair); });
  std::vector<ParityCase> cases;
  while (!missing.empty()) {
    // Starts with a missing pair, so that every case adds at least one.
    const ValuePair pair = *missing.begin();
    Choice start{};
    start[pair[0]] = pair[1];
    start[pair[2]] = pair[3];
    const Choice choice = improved(start, missing);
    for_each_pair(choice, [&](const ValuePair& covered) { missing.erase(covered); });
    cases.push_back(case_of(choice));
  }
  return cases;
}

std::vector<ParityCase> cases_to_run() {
  const char* full = std::getenv("FSDP_FULL");
  return full != nullptr && std::string_view(full) == "1" ? all_cases() : pairwise_cases();
}

}  // namespace fsdp::testing
