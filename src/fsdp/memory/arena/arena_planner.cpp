#include "fsdp/memory/arena/arena_planner.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/memory/arena/arena_placer.h"

namespace fsdp {

namespace {

struct Candidate {
  std::vector<int64_t> offsets;
  std::vector<int32_t> firsts;
  int64_t bytes = std::numeric_limits<int64_t>::max();
  int32_t num_delayed = 0;
  std::string method;
};

// The trace with sizes rounded up to the alignment, so that every offset the searches produce
// (sums and differences of sizes and of the arena's height) is aligned.
LiveTrace aligned(LiveTrace trace, int64_t alignment) {
  for (LiveInterval& interval : trace.intervals) {
    interval.bytes = round_up(interval.bytes, alignment);
  }
  return trace;
}

// The same step from its end to its beginning. A placement of one is a placement of the other, but
// a sweep meets the difficult times in another order.
LiveTrace reversed(LiveTrace trace) {
  for (LiveInterval& interval : trace.intervals) {
    const int32_t first = trace.num_times - 1 - interval.last;
    interval.last = trace.num_times - 1 - interval.first;
    interval.first = first;
    interval.group = -1;  // intervals that begin together need not end together
    interval.may_begin_later = false;
  }
  return trace;
}

class Planner {
 public:
  Planner(const LiveTrace& trace, const ArenaPlannerOptions& options)
      : options_(options),
        trace_(aligned(trace, options.alignment)),
        reversed_(reversed(trace_)),
        bound_(lower_bound_bytes(trace_)),
        decisions_left_(options.max_decisions) {}

  Candidate best() {
    try_known();
    try_orders();
    for (const int32_t beam : {16, options_.beam}) sweep(bound_, beam);
    promote_what_sticks_out();
    narrow(bound_, PrefetchDelays::kForbidden);
    const auto limit = static_cast<int64_t>(static_cast<double>(bound_) * options_.delay_above);
    if (options_.delays == PrefetchDelays::kAllowed && best_.bytes > limit) {
      delay_prefetches(limit / options_.alignment * options_.alignment);
    }
    return std::move(best_);
  }

 private:
  bool optimal() const { return best_.bytes <= bound_; }

  std::vector<int32_t> undelayed() const {
    std::vector<int32_t> firsts;
    for (const LiveInterval& interval : trace_.intervals) firsts.push_back(interval.first);
    return firsts;
  }

  int64_t height(const std::vector<int64_t>& offsets) const {
    int64_t top = 0;
    for (size_t i = 0; i < offsets.size(); ++i) {
      top = std::max(top, offsets[i] + trace_.intervals[i].bytes);
    }
    return top;
  }

  void try_known() {
    if (options_.known_offsets.empty()) return;
    FSDP_ASSERT(options_.known_offsets.size() == trace_.intervals.size());
    const int64_t bytes = height(options_.known_offsets);
    best_ = {options_.known_offsets, undelayed(), bytes, 0, "known placement"};
  }

  std::optional<SweptPlacement> run_sweep(const LiveTrace& trace, int64_t arena_bytes, int32_t beam,
                                          PrefetchDelays delays) {
    if (decisions_left_ <= 0) return std::nullopt;
    SweepOutcome outcome = sweep_into_arena(trace, {.arena_bytes = arena_bytes,
                                                    .beam = beam,
                                                    .delays = delays,
                                                    .max_decisions = decisions_left_});
    decisions_left_ -= outcome.num_decisions;
    return std::move(outcome.placement);
  }

  void try_orders();
  void promote_what_sticks_out();
  bool sweep(int64_t arena_bytes, int32_t beam);
  bool sweep_with_delays(int64_t arena_bytes) {
    std::optional<Candidate> candidate = delayed_into(trace_, arena_bytes);
    if (candidate) best_ = std::move(*candidate);
    return candidate.has_value();
  }
  std::optional<Candidate> delayed_into(const LiveTrace& trace, int64_t arena_bytes);
  Candidate with_fewer_delays(Candidate candidate);
  void delay_prefetches(int64_t limit);

  // Halves the range between an arena that was too small and the best.
  void narrow(int64_t failed, PrefetchDelays delays) {
    const int64_t close_enough = bound_ / 512;
    // The search without delays leaves half of the decisions to the one with delays.
    const int64_t reserved = delays == PrefetchDelays::kAllowed ? 0 : options_.max_decisions / 2;
    while (best_.bytes - failed > close_enough && decisions_left_ > reserved) {
      const int64_t middle =
          (failed + (best_.bytes - failed) / 2) / options_.alignment * options_.alignment;
      const bool found = delays == PrefetchDelays::kAllowed ? sweep_with_delays(middle)
                                                            : sweep(middle, options_.beam);
      if (!found) failed = middle;
      if (middle <= bound_) return;  // rounded down to where we began
    }
  }

  const ArenaPlannerOptions& options_;
  LiveTrace trace_;
  LiveTrace reversed_;
  int64_t bound_;
  int64_t decisions_left_;
  Candidate best_;
};

void Planner::try_orders() {
  const std::vector<int64_t> live = live_bytes(trace_);
  const auto peak = static_cast<int32_t>(std::max_element(live.begin(), live.end()) - live.begin());
  const std::vector<LiveInterval>& intervals = trace_.intervals;
  using Key = std::tuple<int64_t, int64_t>;
  const auto at = [&](int32_t i) -> const LiveInterval& {
    return intervals[static_cast<size_t>(i)];
  };
  const auto length = [&](int32_t i) { return int64_t{at(i).last} - at(i).first + 1; };
  const auto from_peak = [&](int32_t i) {
    return std::max({0, at(i).first - peak, peak - at(i).last});
  };
  const auto sorted_by = [&](auto key) {
    std::vector<int32_t> order(intervals.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return key(a) < key(b); });
    return order;
  };
  const std::vector<std::pair<const char*, std::vector<int32_t>>> orders = {
      {"largest first", sorted_by([&](int32_t i) {
         return Key{-at(i).bytes, at(i).first};
       })},
      {"largest area first", sorted_by([&](int32_t i) {
         // Area in double: bytes x times may not fit 64 bits.
         return -static_cast<double>(at(i).bytes) * static_cast<double>(length(i));
       })},
      {"longest first", sorted_by([&](int32_t i) {
         return Key{-length(i), -at(i).bytes};
       })},
      {"from the peak outwards", sorted_by([&](int32_t i) {
         return Key{from_peak(i), -at(i).bytes};
       })},
      {"earliest first", sorted_by([&](int32_t i) {
         return Key{at(i).first, -at(i).bytes};
       })},
      {"latest first", sorted_by([&](int32_t i) {
         return Key{-at(i).last, -at(i).bytes};
       })},
  };
  std::vector<ArenaItem> items;
  for (const LiveInterval& each : intervals) items.push_back({each.bytes, each.first, each.last});
  ArenaPlacer placer(std::move(items));
  for (const auto& [name, order] : orders) {
    for (const Fit fit : {Fit::kLowest, Fit::kTightest}) {
      if (optimal()) return;
      const int64_t bytes = placer.place(order, fit, best_.bytes - 1);
      if (bytes >= best_.bytes) continue;
      best_ = {{placer.offsets().begin(), placer.offsets().end()}, undelayed(), bytes, 0, name};
    }
  }
}

// Local search over placement orders: the interval that does not fit below the best arena so far is
// placed earlier next time. Finds what a sweep cannot, because it also uses places inside a gap;
// matters for short traces without structure.
void Planner::promote_what_sticks_out() {
  constexpr int64_t kMaxPlaced = 100'000;  // intervals placed in all rounds together
  constexpr int64_t kRoundsUntilRestart = 64;
  const auto num_intervals = static_cast<int64_t>(trace_.intervals.size());
  if (num_intervals == 0 || optimal()) return;
  std::vector<ArenaItem> items;
  for (const LiveInterval& each : trace_.intervals) {
    items.push_back({each.bytes, each.first, each.last});
  }
  ArenaPlacer placer(std::move(items));
  // From bottom to top, which at the lowest gaps is no higher than the placement it came from.
  const auto order_of_best = [&] {
    std::vector<int32_t> order(trace_.intervals.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return best_.offsets[static_cast<size_t>(a)] < best_.offsets[static_cast<size_t>(b)];
    });
    return order;
  };
  std::vector<int32_t> order = order_of_best();
  for (int64_t round = 1; round * num_intervals <= kMaxPlaced && !optimal(); ++round) {
    const int64_t bytes = placer.place(order, Fit::kLowest, best_.bytes - 1);
    if (bytes < best_.bytes) {
      best_ = {{placer.offsets().begin(), placer.offsets().end()},
               undelayed(),
               bytes,
               0,
               "promoting what sticks out"};
    } else if (round % kRoundsUntilRestart == 0) {
      order = order_of_best();
      continue;
    }
    const auto sticks_out = std::find_if(order.begin(), order.end(), [&](int32_t i) {
      const auto index = static_cast<size_t>(i);
      const int64_t offset = placer.offsets()[index];
      return offset >= 0 && offset + trace_.intervals[index].bytes >= best_.bytes;
    });
    // How far forward goes round in eighths of the way: no random numbers, so that all ranks agree.
    const std::ptrdiff_t earlier = (sticks_out - order.begin()) * (round % 8) / 8;
    std::rotate(order.begin() + earlier, sticks_out, sticks_out + 1);
  }
}

bool Planner::sweep(int64_t arena_bytes, int32_t beam) {
  if (best_.bytes <= arena_bytes) return true;
  for (const LiveTrace* trace : {&trace_, &reversed_}) {
    auto found = run_sweep(*trace, arena_bytes, beam, PrefetchDelays::kForbidden);
    if (!found) continue;
    const int64_t bytes = height(found->offsets);
    best_ = {std::move(found->offsets), undelayed(), bytes, 0, "sweep over time"};
    return true;
  }
  return false;
}

std::optional<Candidate> Planner::delayed_into(const LiveTrace& trace, int64_t arena_bytes) {
  auto found = run_sweep(trace, arena_bytes, options_.beam, PrefetchDelays::kAllowed);
  if (!found) return std::nullopt;
  const int64_t bytes = height(found->offsets);
  return Candidate{std::move(found->offsets), std::move(found->firsts), bytes, found->num_delayed,
                   "sweep over time with delays"};
}

// Tries to do without each delay in turn: a beam that may delay everything is not thrifty.
Candidate Planner::with_fewer_delays(Candidate candidate) {
  LiveTrace trace = trace_;
  for (size_t i = 0; i < trace.intervals.size(); ++i) {
    if (candidate.firsts[i] == trace_.intervals[i].first) continue;
    LiveTrace stricter = trace;
    stricter.intervals[i].may_begin_later = false;
    for (LiveInterval& interval : stricter.intervals) {
      const int32_t group = interval.group;
      if (group >= 0 && group == trace.intervals[i].group) interval.may_begin_later = false;
    }
    std::optional<Candidate> fewer = delayed_into(stricter, candidate.bytes);
    if (!fewer || fewer->num_delayed >= candidate.num_delayed) continue;
    candidate = std::move(*fewer);
    trace = std::move(stricter);
  }
  return candidate;
}

// A delay costs overlap, so of the arenas below the limit the one with the fewest delays is taken;
// when none is found, the smallest arena that is.
void Planner::delay_prefetches(int64_t limit) {
  std::optional<Candidate> fewest;
  for (const int64_t arena_bytes : {bound_, limit}) {
    std::optional<Candidate> candidate = delayed_into(trace_, arena_bytes);
    if (!candidate) continue;
    candidate = with_fewer_delays(std::move(*candidate));
    if (!fewest || candidate->num_delayed < fewest->num_delayed) fewest = std::move(candidate);
  }
  if (fewest) {
    best_ = std::move(*fewest);
  } else {
    narrow(limit, PrefetchDelays::kAllowed);
  }
}

}  // namespace

double ArenaPlan::ratio() const {
  return bound_bytes == 0 ? 1.0
                          : static_cast<double>(arena_bytes) / static_cast<double>(bound_bytes);
}

ArenaPlan plan_arena(const LiveTrace& trace, const ArenaPlannerOptions& options) {
  FSDP_CHECK(options.alignment > 0, "alignment is ", options.alignment,
             "; it must be 1 byte or more");
  FSDP_CHECK(options.beam > 0, "beam is ", options.beam, "; it must be 1 or more");
  const Candidate found = Planner(trace, options).best();
  ArenaPlan plan;
  plan.arena_bytes = trace.intervals.empty() ? 0 : found.bytes;
  plan.bound_bytes = lower_bound_bytes(trace);
  plan.num_delayed = found.num_delayed;
  plan.method = found.method;
  plan.trace.num_times = trace.num_times;
  plan.trace.prefetch = trace.prefetch;
  // A delayed prefetch is acquired later: the trace is sorted again by time of acquire.
  std::vector<size_t> order(trace.intervals.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return found.firsts[a] < found.firsts[b]; });
  for (const size_t i : order) {
    plan.trace.intervals.push_back(trace.intervals[i]);
    plan.trace.intervals.back().first = found.firsts[i];
    plan.offsets.push_back(found.offsets[i]);
  }
  plan.delayed_bound_bytes = lower_bound_bytes(plan.trace);
  check_plan(plan);
  return plan;
}

void check_plan(const ArenaPlan& plan) {
  const std::vector<LiveInterval>& intervals = plan.trace.intervals;
  FSDP_ASSERT(intervals.size() == plan.offsets.size());
  for (size_t i = 0; i < intervals.size(); ++i) {
    FSDP_ASSERT(plan.offsets[i] >= 0 && plan.offsets[i] + intervals[i].bytes <= plan.arena_bytes,
                "interval ", i, " lies outside the arena");
    for (size_t j = 0; j < i; ++j) {
      const bool together =
          intervals[i].first <= intervals[j].last && intervals[j].first <= intervals[i].last;
      const bool apart = plan.offsets[i] + intervals[i].bytes <= plan.offsets[j] ||
                         plan.offsets[j] + intervals[j].bytes <= plan.offsets[i];
      FSDP_ASSERT(!together || apart || intervals[i].bytes == 0 || intervals[j].bytes == 0,
                  "intervals ", i, " and ", j, " overlap");
    }
  }
}

}  // namespace fsdp
