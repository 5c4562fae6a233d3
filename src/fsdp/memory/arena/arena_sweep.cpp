#include "fsdp/memory/arena/arena_planner.h"

#include <algorithm>
#include <tuple>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

struct Live {
  int64_t begin;
  int64_t end;
  int32_t last;
};

// One decision on the way to a partial placement; they form a tree towards the root -1.
struct Decision {
  int32_t parent;
  int32_t interval;  // placed at `offset`; -1 - group when that group was postponed
  int64_t offset;
};

struct Partial {
  int32_t first_live;  // into Generation::live, sorted by offset
  int32_t num_live;
  int32_t decision;
  int32_t num_postponed;
  int32_t pending;  // group that begins one time later; -1 for none
};

// Partial placements that have decided the same intervals. One array for all their live intervals:
// a vector in each would cost more than everything else here.
struct Generation {
  std::vector<Live> live;
  std::vector<Partial> partials;

  std::span<const Live> live_of(const Partial& partial) const {
    return std::span<const Live>(live).subspan(static_cast<size_t>(partial.first_live),
                                               static_cast<size_t>(partial.num_live));
  }
  void add(Partial partial, std::span<const Live> its_live) {
    partial.first_live = static_cast<int32_t>(live.size());
    partial.num_live = static_cast<int32_t>(its_live.size());
    live.insert(live.end(), its_live.begin(), its_live.end());
    partials.push_back(partial);
  }
  void append(const Generation& other) {
    for (const Partial& partial : other.partials) add(partial, other.live_of(partial));
  }
  void clear() {
    live.clear();
    partials.clear();
  }
};

// A partial placement on its way through prune().
struct Rated {
  int32_t index;
  int32_t num_postponed;
  int64_t roominess;
  int32_t rank;  // among those with the same number of postponed groups
  uint64_t hash;
};

uint64_t mixed(uint64_t hash, int64_t value) {
  hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

class Sweep {
 public:
  Sweep(const LiveTrace& trace, const SweepRequest& request);
  SweepOutcome run();

 private:
  const LiveInterval& interval(int32_t i) const { return trace_.intervals[static_cast<size_t>(i)]; }
  const LiveInterval& first_of(int32_t group) const {
    return interval(groups_[static_cast<size_t>(group)].front());
  }
  bool exhausted() const {
    return static_cast<int64_t>(decisions_.size()) > request_.max_decisions;
  }

  void remove_ended(int32_t time);
  void resume_pending(int32_t time);
  void begin_group(int32_t group, int32_t time);
  void place_group(Generation& generation, int32_t group, int32_t time);
  void place_interval(const Generation& from, const Partial& partial, int32_t index);
  void prune(Generation& generation, int32_t time);
  int64_t roominess(std::span<const Live> live, int32_t time) const;
  uint64_t layout_hash(const Generation& generation, const Partial& partial) const;
  SweptPlacement result() const;

  const LiveTrace& trace_;
  const SweepRequest& request_;
  std::vector<std::vector<int32_t>> groups_;  // intervals of a group, largest first
  std::vector<std::vector<int32_t>> starts_;  // groups that begin at a time, largest first
  std::vector<Decision> decisions_;
  Generation current_;
  // Scratch of single functions, kept for its memory.
  Generation next_;
  Generation kept_;
  std::vector<Live> scratch_;
  std::vector<Rated> rated_;
};

Sweep::Sweep(const LiveTrace& trace, const SweepRequest& request)
    : trace_(trace), request_(request), starts_(static_cast<size_t>(trace.num_times)) {
  int32_t num_groups = 0;
  for (const LiveInterval& each : trace.intervals)
    num_groups = std::max(num_groups, each.group + 1);
  groups_.resize(static_cast<size_t>(num_groups));
  for (int32_t i = 0; i < static_cast<int32_t>(trace.intervals.size()); ++i) {
    if (interval(i).group < 0) {
      groups_.push_back({i});  // stands alone
    } else {
      groups_[static_cast<size_t>(interval(i).group)].push_back(i);
    }
  }
  const auto larger = [this](int32_t a, int32_t b) {
    return interval(a).bytes > interval(b).bytes;
  };
  for (int32_t g = 0; g < static_cast<int32_t>(groups_.size()); ++g) {
    std::vector<int32_t>& group = groups_[static_cast<size_t>(g)];
    if (group.empty()) continue;
    std::stable_sort(group.begin(), group.end(), larger);
    starts_[static_cast<size_t>(first_of(g).first)].push_back(g);
  }
  for (std::vector<int32_t>& groups : starts_) {
    std::stable_sort(groups.begin(), groups.end(),
                     [&](int32_t a, int32_t b) { return first_of(a).bytes > first_of(b).bytes; });
  }
}

SweepOutcome Sweep::run() {
  current_.add({0, 0, -1, 0, -1}, {});
  for (int32_t time = 0; time < trace_.num_times; ++time) {
    remove_ended(time);
    resume_pending(time);
    for (const int32_t group : starts_[static_cast<size_t>(time)]) begin_group(group, time);
    if (current_.partials.empty() || exhausted()) {
      return {std::nullopt, static_cast<int64_t>(decisions_.size())};
    }
  }
  return {result(), static_cast<int64_t>(decisions_.size())};
}

void Sweep::remove_ended(int32_t time) {
  next_.clear();
  for (const Partial& partial : current_.partials) {
    scratch_.clear();
    for (const Live& live : current_.live_of(partial)) {
      if (live.last >= time) scratch_.push_back(live);
    }
    next_.add(partial, scratch_);
  }
  std::swap(current_, next_);
}

void Sweep::resume_pending(int32_t time) {
  std::vector<int32_t> pending;
  for (const Partial& partial : current_.partials) {
    if (partial.pending >= 0) pending.push_back(partial.pending);
  }
  std::sort(pending.begin(), pending.end());
  pending.erase(std::unique(pending.begin(), pending.end()), pending.end());
  for (const int32_t group : pending) {
    Generation waiting;
    Generation others;
    for (Partial partial : current_.partials) {
      if (partial.pending != group) {
        others.add(partial, current_.live_of(partial));
        continue;
      }
      partial.pending = -1;
      waiting.add(partial, current_.live_of(partial));
    }
    place_group(waiting, group, time);
    others.append(waiting);
    current_ = std::move(others);
    prune(current_, time);
  }
}

void Sweep::begin_group(int32_t group, int32_t time) {
  Generation postponed;
  if (request_.delays == PrefetchDelays::kAllowed && first_of(group).may_begin_later) {
    for (Partial partial : current_.partials) {
      if (partial.pending >= 0) continue;
      decisions_.push_back({partial.decision, -1 - group, 0});
      partial.decision = static_cast<int32_t>(decisions_.size()) - 1;
      partial.pending = group;
      ++partial.num_postponed;
      postponed.add(partial, current_.live_of(partial));
    }
  }
  place_group(current_, group, time);
  if (postponed.partials.empty()) return;
  current_.append(postponed);
  prune(current_, time);
}

void Sweep::place_group(Generation& generation, int32_t group, int32_t time) {
  for (const int32_t index : groups_[static_cast<size_t>(group)]) {
    if (interval(index).bytes == 0) continue;  // goes anywhere: result() leaves it at 0
    next_.clear();
    for (const Partial& partial : generation.partials) place_interval(generation, partial, index);
    std::swap(generation, next_);
    prune(generation, time);
  }
}

void Sweep::place_interval(const Generation& from, const Partial& partial, int32_t index) {
  if (exhausted()) return;
  const int64_t bytes = interval(index).bytes;
  const std::span<const Live> live = from.live_of(partial);
  const auto add = [&](size_t position, int64_t offset) {
    scratch_.assign(live.begin(), live.begin() + static_cast<std::ptrdiff_t>(position));
    scratch_.push_back({offset, offset + bytes, interval(index).last});
    scratch_.insert(scratch_.end(), live.begin() + static_cast<std::ptrdiff_t>(position),
                    live.end());
    decisions_.push_back({partial.decision, index, offset});
    Partial placed = partial;
    placed.decision = static_cast<int32_t>(decisions_.size()) - 1;
    next_.add(placed, scratch_);
  };
  int64_t top = 0;
  for (size_t position = 0; position <= live.size(); ++position) {
    const int64_t ceiling = position < live.size() ? live[position].begin : request_.arena_bytes;
    if (ceiling - top >= bytes) add(position, top);
    if (ceiling - top > bytes) add(position, ceiling - bytes);
    if (position < live.size()) top = live[position].end;
  }
}

// How much of the arena the next units find in large pieces: the squares of the gaps that remain
// once the intervals that end now are gone. In integers, because ranks with different compilers
// must come to the same plan.
int64_t Sweep::roominess(std::span<const Live> live, int32_t time) const {
  const int64_t unit = std::max<int64_t>(request_.arena_bytes >> 20, 1);
  int64_t sum = 0;
  int64_t top = 0;
  const auto add_gap = [&](int64_t ceiling) {
    const int64_t gap = (ceiling - top) / unit;
    sum += gap * gap;
  };
  for (const Live& each : live) {
    if (each.last <= time) continue;
    add_gap(each.begin);
    top = each.end;
  }
  add_gap(request_.arena_bytes);
  return sum;
}

// Equal for layouts that are equal or upside down; a collision only loses one partial placement.
uint64_t Sweep::layout_hash(const Generation& generation, const Partial& partial) const {
  const std::span<const Live> live = generation.live_of(partial);
  uint64_t upright = 1;
  for (const Live& each : live) {
    upright = mixed(mixed(mixed(upright, each.begin), each.end), each.last);
  }
  uint64_t mirrored = 1;
  for (size_t i = live.size(); i-- > 0;) {
    const int64_t begin = request_.arena_bytes - live[i].end;
    const int64_t end = request_.arena_bytes - live[i].begin;
    mirrored = mixed(mixed(mixed(mirrored, begin), end), live[i].last);
  }
  return mixed(std::min(upright, mirrored), partial.pending);
}

void Sweep::prune(Generation& generation, int32_t time) {
  if (generation.partials.size() <= static_cast<size_t>(request_.beam)) return;
  rated_.clear();
  for (int32_t i = 0; i < static_cast<int32_t>(generation.partials.size()); ++i) {
    const Partial& partial = generation.partials[static_cast<size_t>(i)];
    rated_.push_back({i, partial.num_postponed, roominess(generation.live_of(partial), time), 0,
                      layout_hash(generation, partial)});
  }
  // Equal layouts: the one with the fewest postponed groups stays.
  std::sort(rated_.begin(), rated_.end(), [](const Rated& a, const Rated& b) {
    return std::tie(a.hash, a.num_postponed, a.index) < std::tie(b.hash, b.num_postponed, b.index);
  });
  rated_.erase(std::unique(rated_.begin(), rated_.end(),
                           [](const Rated& a, const Rated& b) { return a.hash == b.hash; }),
               rated_.end());
  std::sort(rated_.begin(), rated_.end(), [](const Rated& a, const Rated& b) {
    return std::tuple(a.num_postponed, -a.roominess, a.index) <
           std::tuple(b.num_postponed, -b.roominess, b.index);
  });
  // In turn the best with 0, 1, 2, ... postponed groups: the roomiest alone would postpone
  // everything, the most punctual alone would run into the wall.
  for (size_t i = 1; i < rated_.size(); ++i) {
    if (rated_[i].num_postponed == rated_[i - 1].num_postponed) {
      rated_[i].rank = rated_[i - 1].rank + 1;
    }
  }
  std::stable_sort(rated_.begin(), rated_.end(),
                   [](const Rated& a, const Rated& b) { return a.rank < b.rank; });
  rated_.resize(std::min(rated_.size(), static_cast<size_t>(request_.beam)));
  kept_.clear();
  for (const Rated& each : rated_) {
    const Partial& partial = generation.partials[static_cast<size_t>(each.index)];
    kept_.add(partial, generation.live_of(partial));
  }
  std::swap(generation, kept_);
}

SweptPlacement Sweep::result() const {
  const auto best = std::min_element(
      current_.partials.begin(), current_.partials.end(),
      [](const Partial& a, const Partial& b) { return a.num_postponed < b.num_postponed; });
  SweptPlacement placement;
  placement.offsets.assign(trace_.intervals.size(), 0);
  for (const LiveInterval& each : trace_.intervals) placement.firsts.push_back(each.first);
  placement.num_delayed = best->num_postponed;
  for (int32_t d = best->decision; d >= 0; d = decisions_[static_cast<size_t>(d)].parent) {
    const Decision& decision = decisions_[static_cast<size_t>(d)];
    if (decision.interval >= 0) {
      placement.offsets[static_cast<size_t>(decision.interval)] = decision.offset;
    } else {
      for (const int32_t index : groups_[static_cast<size_t>(-1 - decision.interval)]) {
        ++placement.firsts[static_cast<size_t>(index)];
      }
    }
  }
  return placement;
}

}  // namespace

SweepOutcome sweep_into_arena(const LiveTrace& trace, const SweepRequest& request) {
  return Sweep(trace, request).run();
}

}  // namespace fsdp
