#include "fsdp/optim/learning_rate.h"

#include <array>
#include <cmath>
#include <numbers>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

constexpr std::array<RateSchedule, 4> kSchedules = {RateSchedule::kConstant, RateSchedule::kLinear,
                                                    RateSchedule::kCosine, RateSchedule::kWsd};
constexpr std::array<RateDecay, 2> kDecays = {RateDecay::kLinear, RateDecay::kOneMinusSqrt};

// The steps that decay, at the end of all steps.
int64_t num_decaying(const LearningRateOptions& options) {
  return options.schedule == RateSchedule::kWsd ? options.decay_steps
                                                : options.total_steps - options.warmup_steps;
}

// The fraction from the floor to the rate that is left after the fraction q of the decay.
double fall(const LearningRateOptions& options, double q) {
  switch (options.schedule) {
    case RateSchedule::kConstant:
      return 1;
    case RateSchedule::kLinear:
      return 1 - q;
    case RateSchedule::kCosine:
      return 0.5 * (1 + std::cos(std::numbers::pi * q));
    case RateSchedule::kWsd:
      return options.decay == RateDecay::kLinear ? 1 - q : 1 - std::sqrt(q);
  }
  return 1;
}

void check_steps(const char* field, int64_t steps) {
  if (steps < 0) throw UsageError(concat(field, " is ", steps, "; it must be 0 or more"));
}

}  // namespace

std::string_view name_of(RateSchedule schedule) {
  switch (schedule) {
    case RateSchedule::kConstant:
      return "constant";
    case RateSchedule::kLinear:
      return "linear";
    case RateSchedule::kCosine:
      return "cosine";
    case RateSchedule::kWsd:
      return "wsd";
  }
  return "";
}

std::string_view name_of(RateDecay decay) {
  switch (decay) {
    case RateDecay::kLinear:
      return "linear";
    case RateDecay::kOneMinusSqrt:
      return "1-sqrt";
  }
  return "";
}

std::span<const RateSchedule> all_rate_schedules() { return kSchedules; }
std::span<const RateDecay> all_rate_decays() { return kDecays; }

void LearningRateOptions::validate() const {
  if (!(rate >= 0 && std::isfinite(rate)))
    throw UsageError(concat("rate is ", rate, "; it must be a number of 0 or more"));
  if (!(floor >= 0 && floor <= rate))
    throw UsageError(concat("floor is ", floor, "; it must be from 0 to the rate, ", rate));
  check_steps("warmup_steps", warmup_steps);
  check_steps("total_steps", total_steps);
  check_steps("decay_steps", decay_steps);
  if (schedule != RateSchedule::kWsd && decay_steps > 0)
    throw UsageError(concat("decay_steps is ", decay_steps, ", but the schedule is ",
                            name_of(schedule), "; only wsd decays in a part of its steps"));
  if (schedule == RateSchedule::kConstant) return;
  if (total_steps == 0)
    throw UsageError(concat("total_steps is 0; ", name_of(schedule),
                            " must know its last step: set it, or use constant"));
  if (warmup_steps > total_steps)
    throw UsageError(concat("warmup_steps is ", warmup_steps,
                            "; it must be at most total_steps = ", total_steps));
  if (schedule != RateSchedule::kWsd) return;
  if (decay_steps == 0)
    throw UsageError("decay_steps is 0; wsd needs 1 or more, and without any it is constant");
  if (decay_steps > total_steps - warmup_steps)
    throw UsageError(concat("decay_steps is ", decay_steps, "; it must be at most the ",
                            total_steps - warmup_steps, " steps that follow the warm-up"));
}

double learning_rate(const LearningRateOptions& options, int64_t step) {
  if (step < 1) throw UsageError(concat("step is ", step, "; the first update is step 1"));
  if (step <= options.warmup_steps)
    return options.rate * (static_cast<double>(step) / static_cast<double>(options.warmup_steps));
  if (options.schedule == RateSchedule::kConstant) return options.rate;
  if (step > options.total_steps) return options.floor;
  const int64_t decaying = num_decaying(options);
  const int64_t decayed = step - 1 - (options.total_steps - decaying);
  if (decayed <= 0) return options.rate;
  const double q = static_cast<double>(decayed) / static_cast<double>(decaying);
  return options.floor + (options.rate - options.floor) * fall(options, q);
}

}  // namespace fsdp
