// Learning-rate schedules: pure functions of the step, so that a resumed run needs only its step.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace fsdp {

enum class RateSchedule : uint8_t {
  kConstant,  // the rate, forever
  kLinear,    // falls in a straight line from the rate to the floor
  kCosine,    // falls along half a cosine from the rate to the floor
  kWsd,  // warm-up, stable, decay: the rate until the last decay_steps, then `decay` to the floor
};

// How kWsd falls: the fraction that is left after the fraction q of its decay.
enum class RateDecay : uint8_t {
  kLinear,        // 1 - q
  kOneMinusSqrt,  // 1 - sqrt(q): steep first
};

// "constant", "linear", "cosine", "wsd"; "linear", "1-sqrt".
std::string_view name_of(RateSchedule schedule);
std::string_view name_of(RateDecay decay);

// Every value, in declaration order.
std::span<const RateSchedule> all_rate_schedules();
std::span<const RateDecay> all_rate_decays();

// All schedules start with the same warm-up. Steps count from 1, the first update.
//
//   1 .. warmup_steps        rate * step / warmup_steps
//   until the decay begins   rate
//   in the decay             floor + (rate - floor) * fall(q)
//   after total_steps        floor; constant never ends
//
// The decay is the last n steps (linear and cosine: all after the warm-up; wsd: decay_steps), of
// which the first has q = 0 and the last q = (n - 1) / n. So the first step is a warm-up step with
// a rate above 0, the last warm-up step has the full rate, and no step is wasted at a floor of 0:
// the floor would come after the last step.
struct LearningRateOptions {
  // The part after the warm-up.
  RateSchedule schedule = RateSchedule::kConstant;
  // The highest rate.
  double rate = 3e-4;
  // The lowest rate of the decay.
  double floor = 0;
  // Steps in which the rate rises to its full height; 0: the first step has it.
  int64_t warmup_steps = 0;
  // Steps in all, warm-up included; constant needs none and ignores it.
  int64_t total_steps = 0;
  // Wsd only: how many of the last steps decay.
  int64_t decay_steps = 0;
  // Wsd only: the form of their decay.
  RateDecay decay = RateDecay::kLinear;

  // Throws UsageError with the field, its value and the fix.
  void validate() const;
};

// The rate of a step. `options` must be valid; UsageError for a step before the first.
double learning_rate(const LearningRateOptions& options, int64_t step);

}  // namespace fsdp
