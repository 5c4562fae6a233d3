#include "fsdp/memory/arena/arena_planner.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

// Partial placements kept by the thorough sweeps (Note [Sweep over time]).
constexpr int32_t kBeam = 128;
// How far above the bound a plan may be before prefetches are delayed.
constexpr double kDelayAbove = 1.02;

struct Candidate {
  std::vector<int64_t> offsets;
  std::vector<int32_t> firsts;
  int64_t bytes = 0;
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

// Places the largest interval first, each in the lowest gap between those that are live with it.
std::vector<int64_t> largest_first(const LiveTrace& trace) {
  const std::vector<LiveInterval>& intervals = trace.intervals;
  std::vector<size_t> order(intervals.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return intervals[a].bytes > intervals[b].bytes; });
  std::vector<int64_t> offsets(intervals.size(), 0);
  for (size_t placed = 0; placed < order.size(); ++placed) {
    const LiveInterval& own = intervals[order[placed]];
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (size_t i = 0; i < placed; ++i) {
      const LiveInterval& other = intervals[order[i]];
      if (own.first <= other.last && other.first <= own.last)
        taken.emplace_back(offsets[order[i]], offsets[order[i]] + other.bytes);
    }
    std::sort(taken.begin(), taken.end());
    int64_t& offset = offsets[order[placed]];
    for (const auto& [begin, end] : taken) {
      if (begin - offset >= own.bytes) break;
      offset = std::max(offset, end);
    }
  }
  return offsets;
}

// The step from its end to its beginning. A placement of one is a placement of the other, but
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
    begin();
    for (const int32_t beam : {16, kBeam}) sweep(bound_, beam);
    narrow(bound_, PrefetchDelays::kForbidden);
    const auto limit = static_cast<int64_t>(static_cast<double>(bound_) * kDelayAbove);
    if (best_.bytes > limit) delay_prefetches(limit / options_.alignment * options_.alignment);
    return std::move(best_);
  }

 private:
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

  void begin() {
    best_ = {largest_first(trace_), undelayed(), 0, 0, "largest first"};
    best_.bytes = height(best_.offsets);
    if (options_.known_offsets.empty()) return;
    FSDP_ASSERT(options_.known_offsets.size() == trace_.intervals.size());
    const int64_t bytes = height(options_.known_offsets);
    if (bytes <= best_.bytes)
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
      const bool found =
          delays == PrefetchDelays::kAllowed ? sweep_with_delays(middle) : sweep(middle, kBeam);
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
  auto found = run_sweep(trace, arena_bytes, kBeam, PrefetchDelays::kAllowed);
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

// The result is checked before anybody relies on it.
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

}  // namespace

double ArenaPlan::ratio() const {
  return bound_bytes == 0 ? 1.0
                          : static_cast<double>(arena_bytes) / static_cast<double>(bound_bytes);
}

ArenaPlan plan_arena(const LiveTrace& trace, const ArenaPlannerOptions& options) {
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

}  // namespace fsdp
