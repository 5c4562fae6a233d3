// When to gather which unit: learns the order of a step and follows it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp {

enum class Phase : uint8_t { kForward, kBackward };

// The weights' part of a live trace, by time. The pool was planned with the same trace, so a caller
// that follows this plan never asks the pool for more than it has.
class GatherPlan {
 public:
  struct Gather {
    int32_t unit = -1;
    int32_t last = -1;  // its weights are released after this time
  };

  GatherPlan() = default;
  // `trace` was made from `order` and names the units of `table`.
  GatherPlan(const StepOrder& order, const LiveTrace& trace, const BucketTable& table);

  // Works without a pool for the weights, too: there is still an order to gather in. `scheduled`
  // says which units take part.
  static GatherPlan without_pool(const StepOrder& order, const std::vector<bool>& scheduled,
                                 int32_t prefetch);

  int32_t num_forward() const { return num_forward_; }
  int32_t num_times() const { return static_cast<int32_t>(uses_.size()); }
  bool expects(int32_t time, int32_t unit, Phase phase) const {
    return time < num_times() && uses_[static_cast<size_t>(time)] == unit &&
           (time < num_forward_) == (phase == Phase::kForward);
  }
  int32_t first_unit() const { return uses_.empty() ? -1 : uses_.front(); }

  // The gathers to start with the use at this time, most urgent first.
  std::span<const Gather> gathers_at(int32_t time) const {
    return gathers_[static_cast<size_t>(time)];
  }

 private:
  std::vector<int32_t> uses_;  // forward followed by backward
  int32_t num_forward_ = 0;
  std::vector<std::vector<Gather>> gathers_;
};

// Records when units begin and end.
class StepRecorder {
 public:
  void reset();
  // Returns the time of this use.
  int32_t begin(int32_t unit, Phase phase);
  void end(int32_t time);

  int32_t now() const { return static_cast<int32_t>(uses_.size()) - 1; }
  int32_t num_forward() const { return num_forward_; }
  bool has_backward() const { return num_forward_ < static_cast<int32_t>(uses_.size()); }
  bool has_used(int32_t unit) const {
    return std::find(uses_.begin(), uses_.end(), unit) != uses_.end();
  }

  // The order seen so far. Open uses end now. A use that ended before a later one gets the later
  // one's end, since uses nest.
  StepOrder order() const;

 private:
  std::vector<int32_t> uses_;
  std::vector<int32_t> ends_;  // -1: still open
  int32_t num_forward_ = 0;
};

// The n-th use of a unit in a pass is time n of the schedule, which is followed until a unit comes
// unexpectedly, then not until the next pass. docs/engine.md ("Order") says which order is
// expected.
class Schedule {
 public:
  enum class Kind : uint8_t { kNone, kTraining, kInference };

  // `scheduled` says which units take part, by index.
  Schedule(std::vector<bool> scheduled, int32_t prefetch);

  // Expects this order from now on. `pool` was made for it, or is nullptr if it holds no weights.
  void expect(StepOrder order, const BucketPool* pool);
  const StepOrder& order() const { return order_; }

  Kind kind() const { return kind_; }
  void open(Kind kind);
  // Ends the pass. A complete training pass may return a new order, which the caller then plans
  // for; `names` are for the report.
  std::optional<StepOrder> close(std::span<const std::string> names);
  void cancel() { kind_ = Kind::kNone; }

  // Whether a forward of this unit begins another pass: the last one had its whole forward, and no
  // backward came.
  bool would_start_anew(int32_t unit) const;

  // Returns the time of the use; follows() then says whether it was expected.
  int32_t begin(int32_t unit, Phase phase);
  void end(int32_t time) { recorder_.end(time); }
  int32_t now() const { return recorder_.now(); }
  bool follows() const { return follows_; }

  // The gathers to start with the use that has just begun; none after a surprise.
  std::span<const GatherPlan::Gather> gathers_now() const;

 private:
  const GatherPlan& plan() const { return kind_ == Kind::kInference ? inference_ : training_; }

  bool had_whole_forward() const;

  const std::vector<bool> scheduled_;
  const int32_t prefetch_;
  StepOrder order_;
  GatherPlan training_;
  GatherPlan inference_;
  StepRecorder recorder_;
  Kind kind_ = Kind::kNone;
  bool follows_ = false;
  bool is_recorded_ = false;           // order_ was seen, not guessed
  bool is_reported_ = false;           // that the order changed
  std::optional<StepOrder> surprise_;  // the order of the last pass, if it was not order_
};

bool operator==(const StepOrder& a, const StepOrder& b);

}  // namespace fsdp
