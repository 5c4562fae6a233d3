// The options that all optimizers have in common.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp {

// Treats some parameters in another way than the others.
struct ParameterRule {
  // Matches the names of parameters: `*` is any text (dots too), `?` one character, `|` separates
  // alternatives; "*.bias|*.norm.weight", "embed.weight".
  std::string pattern;
  // Their weight decay, for any shape. nullopt: as without the rule.
  std::optional<double> weight_decay = std::nullopt;
  // Multiplies the schedule's learning rate for them; 0 freezes them.
  double rate_scale = 1.0;
};

// How a step reacts to a NaN or Inf in a gradient of any rank.
enum class OnNonfinite : uint8_t {
  kUpdate,  // updates, as libtorch does
  kSkip,    // changes nothing, on no rank; decided on the device
};

// When updates run.
enum class Updates : uint8_t {
  // Unit by unit, beside the next work: step() returns at once, and the next forward waits for the
  // update of the unit it needs.
  kHidden,
  kBlocking,  // step() returns after all updates (devices: after queueing them for the computation)
};

// How a step treats a parameter that got no gradient in its cycle, on any rank: an unused head,
// a layer that was frozen after fully_shard().
enum class WithoutGradient : uint8_t {
  kSkip,    // leaves it and its moments alone, as libtorch does
  kUpdate,  // takes the gradient for 0: the weight decays, and moves by its moments
};

// How an updated weight is rounded if no wider copy of it is kept (MainWeight::kIsWeight).
enum class Rounding : uint8_t {
  kNearest,     // ties to even: updates of less than half an ulp are lost
  kStochastic,  // up or down so that the mean is right; drawn from (seed, step, group, position)
};

// Losses are multiplied by a scale so that fp16 gradients do not vanish, and the update divides
// gradients by it again. Multiply with Optimizer::scaled().
struct LossScale {
  // The scale, or its first value. 1: no scaling.
  double initial = 1.0;

  // Multiplies the scale after a step that was skipped because of a NaN or Inf. 1 for this and
  // `growth`: the scale stays as it is.
  double backoff = 1.0;

  // Multiplies the scale after `interval` good steps in a row.
  double growth = 1.0;
  int64_t interval = 2000;

  static LossScale fixed(double scale) { return {.initial = scale}; }
  // Grows until gradients overflow, then steps back.
  static LossScale dynamic(double initial = 65536.0) {
    return {.initial = initial, .backoff = 0.5, .growth = 2.0};
  }
};

// The options of a step as a whole.
struct StepOptions {
  // Clips the gradients of all ranks to this norm. 0: no clipping.
  double max_norm = 0.0;

  // Computes the norm even if nothing needs it, for Optimizer::gradient_norm().
  bool measures_norm = false;

  // Reaction to NaN or Inf gradients; with a dynamic loss scale the step is skipped.
  OnNonfinite on_nonfinite = OnNonfinite::kUpdate;

  // For fp16 gradients.
  LossScale loss_scale = {};

  // When updates run.
  Updates updates = Updates::kHidden;

  // Treatment of parameters without a gradient.
  WithoutGradient without_gradient = WithoutGradient::kSkip;

  // How a bf16 or fp16 weight without a main weight is rounded (precision.main_params = nullopt).
  Rounding rounding = Rounding::kNearest;

  // For the random numbers of stochastic rounding, which narrow moments use, too.
  uint64_t seed = 0;

  // Remembers which weights' bits have changed, one bit each, for patches (checkpoint/patches.h).
  bool marks_changes = false;

  // UsageError naming the field, its value and the fix.
  void validate() const;
};

}  // namespace fsdp
