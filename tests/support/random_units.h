// Random models and steps for property tests of pools and planners.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp::testing {

class RandomModel {
 public:
  explicit RandomModel(uint32_t seed) : random_(seed) {}

  int32_t between(int32_t low, int32_t high) {
    // Not std::uniform_int_distribution: its values differ between standard libraries.
    return low + static_cast<int32_t>(random_() % static_cast<uint32_t>(high - low + 1));
  }

  // Units of a few kinds in random order, as in a hybrid stack; sizes are multiples of `grain`.
  std::vector<UnitBuckets> units(int32_t max_units, int64_t grain) {
    std::vector<UnitBuckets> kinds(static_cast<size_t>(between(1, 4)));
    for (UnitBuckets& kind : kinds) kind = unit_kind(grain);
    std::vector<UnitBuckets> result;
    const int32_t num_units = between(1, max_units);
    for (int32_t i = 0; i < num_units; ++i) {
      result.push_back(
          kinds[static_cast<size_t>(between(0, static_cast<int32_t>(kinds.size()) - 1))]);
      result.back().name = "unit" + std::to_string(i);
    }
    return result;
  }

  // Mostly every unit once; some units again, as with shared embeddings.
  StepOrder order(int32_t num_units) {
    std::vector<int32_t> forward;
    for (int32_t unit = 0; unit < num_units; ++unit) {
      forward.push_back(unit);
      if (between(0, 9) == 0) forward.push_back(between(0, num_units - 1));
    }
    return mirrored_order(forward);
  }

  // For the uses from `first` to `last` of one pass: when each ends. About every third use has the
  // next few nested in it, and those have others in themselves.
  std::vector<int32_t> nested_ends(int32_t first, int32_t last) {
    std::vector<int32_t> ends;
    std::vector<int32_t> computing = {last};  // ends of the uses around, outermost first
    for (int32_t use = first; use <= last; ++use) {
      while (computing.size() > 1 && computing.back() < use) computing.pop_back();
      const bool nests = between(0, 2) == 0;
      ends.push_back(nests ? std::min(computing.back(), use + between(1, 4)) : use);
      computing.push_back(ends.back());
    }
    return ends;
  }

  // Like order(), but with uses nested in others.
  StepOrder nested_order(int32_t num_units) {
    std::vector<int32_t> forward = order(num_units).forward;
    std::vector<int32_t> ends = nested_ends(0, static_cast<int32_t>(forward.size()) - 1);
    return mirrored_order(std::move(forward), std::move(ends));
  }

 private:
  UnitBuckets unit_kind(int64_t grain) {
    constexpr std::array<DType, 3> kDTypes = {DType::kBFloat16, DType::kFloat32, DType::kUInt8};
    UnitBuckets kind;
    const int32_t num_buckets = between(1, 3);
    for (int32_t i = 0; i < num_buckets; ++i) {
      const int64_t numel = grain * between(0, 20);
      const DType dtype = kDTypes[static_cast<size_t>(between(0, 2))];
      const std::string suffix = std::to_string(i);
      kind.buckets.push_back(
          {"weight" + suffix, numel * element_bytes(dtype), dtype, BucketRole::kWeight});
      if (between(0, 4) == 0) continue;  // frozen: no gradient
      kind.buckets.push_back(
          {"gradient" + suffix, numel * 4, DType::kFloat32, BucketRole::kGradient});
    }
    return kind;
  }

  std::mt19937 random_;
};

}  // namespace fsdp::testing
