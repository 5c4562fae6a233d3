#include "fsdp/memory/live_trace.h"

#include <algorithm>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

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

// S of Note [ZeRO-3 live intervals], and the last time of each use.
struct Uses {
  std::vector<int32_t> units;
  std::vector<int32_t> ends;
};

// When the weights of each use are wanted first. How far the window of prefetches reaches never
// goes back, because the depth of nesting grows by one per time at most.
std::vector<int32_t> gather_times(const Uses& uses, int32_t num_units, int32_t prefetch) {
  std::vector<int32_t> times;
  std::vector<int32_t> computing;                                         // uses, outermost first
  std::vector<int32_t> num_computing(static_cast<size_t>(num_units), 0);  // uses, by unit
  int32_t depth = 0;                                                      // units among them
  for (int32_t time = 0; time < static_cast<int32_t>(uses.units.size()); ++time) {
    const auto uses_of = [&](int32_t use) -> int32_t& {
      return num_computing[static_cast<size_t>(uses.units[static_cast<size_t>(use)])];
    };
    while (!computing.empty() && uses.ends[static_cast<size_t>(computing.back())] < time) {
      if (--uses_of(computing.back()) == 0) --depth;
      computing.pop_back();
    }
    computing.push_back(time);
    if (uses_of(time)++ == 0) ++depth;
    const int64_t reach = time + std::max<int64_t>(0, int64_t{prefetch} + 1 - depth);
    while (times.size() < uses.units.size() && static_cast<int64_t>(times.size()) <= reach) {
      times.push_back(time);
    }
  }
  return times;
}

std::vector<Stay> weight_stays(const Uses& uses, int32_t num_units, int32_t prefetch) {
  const std::vector<int32_t> times = gather_times(uses, num_units, prefetch);
  std::vector<Stay> stays;
  std::vector<int32_t> stay_of_unit(static_cast<size_t>(num_units), -1);
  for (int32_t use = 0; use < static_cast<int32_t>(uses.units.size()); ++use) {
    const int32_t unit = uses.units[static_cast<size_t>(use)];
    const int32_t first = times[static_cast<size_t>(use)];
    const int32_t last = uses.ends[static_cast<size_t>(use)];
    int32_t& open = stay_of_unit[static_cast<size_t>(unit)];
    if (open >= 0 && stays[static_cast<size_t>(open)].last + 1 >= first) {
      int32_t& until = stays[static_cast<size_t>(open)].last;
      until = std::max(until, last);
      continue;
    }
    open = static_cast<int32_t>(stays.size());
    // Beginning one unit later still leaves one unit of computation to hide the gather behind.
    stays.push_back({unit, BucketRole::kWeight, first, last, use - first >= 2, use});
  }
  return stays;
}

std::vector<Stay> gradient_stays(const Uses& uses, size_t num_forward, int32_t num_units) {
  std::vector<Stay> stays(static_cast<size_t>(num_units),
                          {-1, BucketRole::kGradient, 0, 0, false, 0});
  for (size_t use = num_forward; use < uses.units.size(); ++use) {
    const int32_t unit = uses.units[use];
    const auto time = static_cast<int32_t>(use);
    Stay& stay = stays[static_cast<size_t>(unit)];
    stay = {unit, stay.role, time, std::max(stay.last, uses.ends[use] + 1), false, time};
  }
  std::erase_if(stays, [](const Stay& stay) { return stay.unit < 0; });
  return stays;
}

Uses uses_of(const StepOrder& order) {
  Uses uses{order.forward, order.ends};
  uses.units.insert(uses.units.end(), order.backward.begin(), order.backward.end());
  if (uses.ends.empty()) {
    uses.ends.resize(uses.units.size());
    std::iota(uses.ends.begin(), uses.ends.end(), 0);
  }
  FSDP_ASSERT(uses.ends.size() == uses.units.size());
  return uses;
}

}  // namespace

std::vector<int64_t> live_bytes(const LiveTrace& trace) {
  // Differences first, one running sum after: linear in the number of intervals.
  std::vector<int64_t> change(static_cast<size_t>(trace.num_times) + 1, 0);
  for (const LiveInterval& interval : trace.intervals) {
    int64_t& begins = change[static_cast<size_t>(interval.first)];
    begins = checked_add(begins, interval.bytes);
    change[static_cast<size_t>(interval.last) + 1] -= interval.bytes;
  }
  int64_t live = 0;
  for (int64_t& value : change) {
    live = checked_add(live, value);
    value = live;
  }
  change.pop_back();
  return change;
}

int64_t lower_bound_bytes(const LiveTrace& trace) {
  const std::vector<int64_t> live = live_bytes(trace);
  return live.empty() ? 0 : *std::max_element(live.begin(), live.end());
}

int32_t most_live_units(const LiveTrace& trace, const BucketTable& table, BucketRole role) {
  // Each stay of a unit counts as one bucket of one byte: the intervals of a group are one stay.
  LiveTrace stays;
  stays.num_times = trace.num_times;
  for (const LiveInterval& interval : trace.intervals) {
    if (table.bucket(interval.bucket).role != role) continue;
    if (!stays.intervals.empty() && interval.group >= 0 &&
        stays.intervals.back().group == interval.group)
      continue;
    stays.intervals.push_back(interval);
    stays.intervals.back().bytes = 1;
  }
  return static_cast<int32_t>(lower_bound_bytes(stays));
}

StepOrder mirrored_order(std::vector<int32_t> forward, std::vector<int32_t> ends) {
  FSDP_ASSERT(ends.empty() || ends.size() == forward.size());
  const auto num_forward = static_cast<int32_t>(forward.size());
  StepOrder order{std::move(forward), {}, std::move(ends)};
  if (order.ends.empty()) {
    order.backward.assign(order.forward.rbegin(), order.forward.rend());
    return order;
  }
  std::vector<int32_t> uses(order.forward.size());  // of the forward, as they begin backward
  std::iota(uses.begin(), uses.end(), 0);
  std::stable_sort(uses.begin(), uses.end(), [&](int32_t a, int32_t b) {
    return order.ends[static_cast<size_t>(a)] > order.ends[static_cast<size_t>(b)];
  });
  for (int32_t i = 0; i < num_forward; ++i) {
    const int32_t use = uses[static_cast<size_t>(i)];
    const int32_t num_within = order.ends[static_cast<size_t>(use)] - use;
    order.backward.push_back(order.forward[static_cast<size_t>(use)]);
    order.ends.push_back(num_forward + i + num_within);
  }
  return order;
}

StepOrder declared_order(const BucketTable& table) {
  std::vector<int32_t> forward(static_cast<size_t>(table.num_units()));
  std::iota(forward.begin(), forward.end(), 0);
  return mirrored_order(std::move(forward));
}

LiveTrace zero3_trace(const BucketTable& table, const StepOrder& order, int32_t prefetch) {
  const Uses uses = uses_of(order);
  std::vector<Stay> stays = weight_stays(uses, table.num_units(), prefetch);
  const std::vector<Stay> gradients = gradient_stays(uses, order.forward.size(), table.num_units());
  stays.insert(stays.end(), gradients.begin(), gradients.end());
  // The order of acquire: at one time the unit that computes takes its gradient bucket before the
  // prefetch of a later unit is issued, and prefetches are issued in the order of use.
  std::stable_sort(stays.begin(), stays.end(), [](const Stay& a, const Stay& b) {
    if (a.first != b.first) return a.first < b.first;
    if (a.role != b.role) return a.role == BucketRole::kGradient;
    return a.first_use < b.first_use;
  });

  LiveTrace trace;
  trace.num_times = static_cast<int32_t>(uses.units.size()) + 1;
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
