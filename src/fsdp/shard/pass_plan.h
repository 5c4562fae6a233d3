// Where in a pass we are, what is expected next, and what the order turned out to be.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/memory/bucket_pool.h"
#include "fsdp/shard/step_schedule.h"

namespace fsdp {

// A pass is a forward and the backward that follows, or a forward without gradients. The n-th use
// of a unit in it is time n of the schedule. As long as units come as expected the schedule is
// followed; after the first surprise it is not, until the next pass.
//
// The first training pass expects units in order of registration, and backward in reverse. The
// order it really had is what later passes expect. If a later pass differs, that is reported once;
// if the next one differs in the same way, the new order is adopted.
class PassPlan {
 public:
  enum class Kind : uint8_t { kNone, kTraining, kInference };

  // `scheduled` says which units take part, by index.
  PassPlan(std::vector<bool> scheduled, int32_t prefetch);

  // From now on this order is expected. `pool` was made for it, or is nullptr when it holds no
  // weights.
  void expect(StepOrder order, const BucketPool* pool);
  const StepOrder& order() const { return order_; }

  Kind kind() const { return kind_; }
  void open(Kind kind);
  // Ends the pass. A training pass that was complete may have taught a new order, which the caller
  // then plans for; `names` are for the report.
  std::optional<StepOrder> close(std::span<const std::string> names);
  void abandon() { kind_ = Kind::kNone; }

  // Whether a forward of this unit is the beginning of another pass: the last one had its whole
  // forward, and no backward came.
  bool would_start_anew(int32_t unit) const;
  bool has_backward() const { return recorder_.has_backward(); }

  // Returns the time of the use; follows() afterwards says whether it was expected.
  int32_t begin(int32_t unit, Phase phase);
  void end(int32_t time) { recorder_.end(time); }
  int32_t now() const { return recorder_.now(); }
  bool follows() const { return follows_; }

  // What to gather when the use that just began does; nothing after a surprise.
  std::span<const StepSchedule::Gather> gathers_now() const;

 private:
  const StepSchedule& schedule() const {
    return kind_ == Kind::kInference ? inference_ : training_;
  }

  bool had_whole_forward() const;

  const std::vector<bool> scheduled_;
  const int32_t prefetch_;
  StepOrder order_;
  StepSchedule training_;
  StepSchedule inference_;
  StepRecorder recorder_;
  Kind kind_ = Kind::kNone;
  bool follows_ = false;
  bool is_recorded_ = false;           // order_ was seen, not guessed
  bool is_reported_ = false;           // that the order changed
  std::optional<StepOrder> surprise_;  // the order of the last pass, when it was not order_
};

bool operator==(const StepOrder& a, const StepOrder& b);

}  // namespace fsdp
