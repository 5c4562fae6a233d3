// When to gather which unit in a step whose order is known, and a recorder that learns the order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/live_trace.h"
#include "fsdp/memory/step_order.h"

namespace fsdp {

enum class Phase : uint8_t { kForward, kBackward };

// The weights' part of a live trace, by time: the pool was planned with the same trace, so whoever
// follows this never asks it for more than it has.
class StepSchedule {
 public:
  struct Gather {
    int32_t unit = -1;
    int32_t last = -1;  // the time after which it is let go
  };

  StepSchedule() = default;
  // `trace` was made from `order` and names the units of `table`.
  StepSchedule(const StepOrder& order, const LiveTrace& trace, const BucketTable& table);

  // The same when no pool holds the weights: there is still an order to gather in. `scheduled` says
  // which units take part.
  static StepSchedule without_pool(const StepOrder& order, const std::vector<bool>& scheduled,
                                   int32_t prefetch);

  int32_t num_forward() const { return num_forward_; }
  int32_t num_times() const { return static_cast<int32_t>(uses_.size()); }
  bool expects(int32_t time, int32_t unit, Phase phase) const {
    return time < num_times() && uses_[static_cast<size_t>(time)] == unit &&
           (time < num_forward_) == (phase == Phase::kForward);
  }
  int32_t first_unit() const { return uses_.empty() ? -1 : uses_.front(); }

  // The gathers to start when the use at this time begins, most urgent first.
  std::span<const Gather> gathers_at(int32_t time) const {
    return gathers_[static_cast<size_t>(time)];
  }

 private:
  std::vector<int32_t> uses_;  // forward followed by backward
  int32_t num_forward_ = 0;
  std::vector<std::vector<Gather>> gathers_;
};

// Writes down when units begin and end.
class StepRecorder {
 public:
  void clear();
  // Returns the time of this use.
  int32_t begin(int32_t unit, Phase phase);
  void end(int32_t time);

  int32_t now() const { return static_cast<int32_t>(uses_.size()) - 1; }
  int32_t num_forward() const { return num_forward_; }
  bool has_backward() const { return num_forward_ < static_cast<int32_t>(uses_.size()); }
  bool is_empty() const { return uses_.empty(); }
  bool has_used(int32_t unit) const {
    return std::find(uses_.begin(), uses_.end(), unit) != uses_.end();
  }

  // What was seen so far. Uses that are still open end now; one that ended while a later one went
  // on is given that one's end, since uses nest.
  StepOrder order() const;

 private:
  std::vector<int32_t> uses_;
  std::vector<int32_t> ends_;  // -1: still open
  int32_t num_forward_ = 0;
};

}  // namespace fsdp
