#include "fsdp/memory/step_order.h"

#include <algorithm>
#include <numeric>

#include "fsdp/base/error.h"

namespace fsdp {

namespace {

// A run of times during which one role of one unit is live.
struct Stay {
  int32_t unit = 0;
  BucketRole role = BucketRole::kWeight;
  int32_t first = 0;
  int32_t last = 0;
  bool may_begin_later = false;
  int32_t first_use = 0;
};

std::vector<Stay> weight_stays(const std::vector<int32_t>& sequence, int32_t num_units,
                               int32_t prefetch) {
  std::vector<Stay> stays;
  std::vector<int32_t> stay_of_unit(static_cast<size_t>(num_units), -1);
  for (int32_t use = 0; use < static_cast<int32_t>(sequence.size()); ++use) {
    const int32_t unit = sequence[static_cast<size_t>(use)];
    const int32_t first = std::max(0, use - prefetch);
    int32_t& open = stay_of_unit[static_cast<size_t>(unit)];
    if (open >= 0 && stays[static_cast<size_t>(open)].last + 1 >= first) {
      stays[static_cast<size_t>(open)].last = use;
      continue;
    }
    open = static_cast<int32_t>(stays.size());
    // Beginning one unit later still leaves one unit of computation to hide the gather behind.
    stays.push_back({unit, BucketRole::kWeight, first, use, use - first >= 2, use});
  }
  return stays;
}

std::vector<Stay> gradient_stays(const StepOrder& order, int32_t num_units) {
  std::vector<int32_t> last_use(static_cast<size_t>(num_units), -1);
  const auto num_forward = static_cast<int32_t>(order.forward.size());
  for (int32_t i = 0; i < static_cast<int32_t>(order.backward.size()); ++i) {
    last_use[static_cast<size_t>(order.backward[static_cast<size_t>(i)])] = num_forward + i;
  }
  std::vector<Stay> stays;
  for (int32_t unit = 0; unit < num_units; ++unit) {
    const int32_t use = last_use[static_cast<size_t>(unit)];
    if (use >= 0) stays.push_back({unit, BucketRole::kGradient, use, use + 1, false, use});
  }
  return stays;
}

void check_order(const std::vector<int32_t>& units, const BucketTable& table, const char* pass) {
  for (const int32_t unit : units) {
    FSDP_CHECK(unit >= 0 && unit < table.num_units(), "the ", pass, " order names unit ", unit,
               ", but only ", table.num_units(), " units are declared");
  }
}

}  // namespace

StepOrder mirrored_order(std::vector<int32_t> forward) {
  std::vector<int32_t> backward(forward.rbegin(), forward.rend());
  return {std::move(forward), std::move(backward)};
}

StepOrder declared_order(const BucketTable& table) {
  std::vector<int32_t> forward(static_cast<size_t>(table.num_units()));
  std::iota(forward.begin(), forward.end(), 0);
  return mirrored_order(std::move(forward));
}

LiveTrace zero3_trace(const BucketTable& table, const StepOrder& order, int32_t prefetch) {
  FSDP_CHECK(prefetch >= 0, "prefetch is ", prefetch, "; it counts units ahead, so 0 or more");
  check_order(order.forward, table, "forward");
  check_order(order.backward, table, "backward");
  std::vector<int32_t> sequence = order.forward;
  sequence.insert(sequence.end(), order.backward.begin(), order.backward.end());

  std::vector<Stay> stays = weight_stays(sequence, table.num_units(), prefetch);
  const std::vector<Stay> gradients = gradient_stays(order, table.num_units());
  stays.insert(stays.end(), gradients.begin(), gradients.end());
  // The order of acquire: at one time the unit that computes takes its gradient bucket before the
  // prefetch of a later unit is issued, and prefetches are issued in the order of use.
  std::stable_sort(stays.begin(), stays.end(), [](const Stay& a, const Stay& b) {
    if (a.first != b.first) return a.first < b.first;
    if (a.role != b.role) return a.role == BucketRole::kGradient;
    return a.first_use < b.first_use;
  });

  LiveTrace trace;
  trace.num_times = static_cast<int32_t>(sequence.size()) + 1;
  trace.prefetch = prefetch;
  int32_t group = 0;
  for (const Stay& stay : stays) {
    const std::vector<Bucket>& buckets = table.units()[static_cast<size_t>(stay.unit)].buckets;
    for (int32_t i = 0; i < static_cast<int32_t>(buckets.size()); ++i) {
      const Bucket& bucket = buckets[static_cast<size_t>(i)];
      if (bucket.role != stay.role) continue;
      trace.intervals.push_back(
          {{stay.unit, i}, bucket.bytes, stay.first, stay.last, stay.may_begin_later, group});
    }
    ++group;
  }
  return trace;
}

}  // namespace fsdp
