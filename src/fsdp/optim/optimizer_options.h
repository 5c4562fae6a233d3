// What optimizers have in common that a user decides.
#pragma once

#include <cstdint>

#include "fsdp/optim/update_rules.h"

namespace fsdp {

// What a step does when a gradient of any rank is NaN or Inf.
enum class OnNonfinite : uint8_t {
  kUpdate,  // goes on, as libtorch does
  kSkip,    // changes nothing, on no rank; decided on the device
};

// When updates run.
enum class Updates : uint8_t {
  // Unit by unit, beside what comes next: step() returns at once, and the next forward waits for
  // the update of the unit it needs.
  kHidden,
  kBlocking,  // step() returns when all is done (on a device: is queued on the computing stream)
};

// Losses are multiplied by a scale so that fp16 gradients do not vanish, and gradients are divided
// by it again inside the update. Multiply with Optimizer::scaled().
struct LossScale {
  // What it is, or begins with. 1: no scaling.
  double initial = 1.0;

  // After a step that was skipped because of a NaN or Inf the scale is multiplied by this. 1 for
  // this and `growth`: the scale stays as it is.
  double backoff = 1.0;

  // After `interval` good steps in a row the scale is multiplied by this.
  double growth = 1.0;
  int64_t interval = 2000;

  static LossScale fixed(double scale) { return {.initial = scale}; }
  // Grows until gradients overflow, and steps back when they do.
  static LossScale dynamic(double initial = 65536.0) {
    return {.initial = initial, .backoff = 0.5, .growth = 2.0};
  }
};

// What concerns a step as a whole.
struct StepOptions {
  // Gradients of all ranks are clipped to this norm. 0: they are not.
  double max_norm = 0.0;

  // Compute the norm even if nothing needs it, for Optimizer::gradient_norm().
  bool measures_norm = false;

  // What happens to a step with NaN or Inf gradients; with a dynamic loss scale it is skipped.
  OnNonfinite on_nonfinite = OnNonfinite::kUpdate;

  // For fp16 gradients.
  LossScale loss_scale = {};

  // When updates run.
  Updates updates = Updates::kHidden;

  // How a bf16 or fp16 weight without a main weight is rounded (precision.main_params = nullopt).
  Rounding rounding = Rounding::kNearest;

  // Of the random numbers of stochastic rounding, which narrow moments use too.
  uint64_t seed = 0;

  // UsageError naming the field, its value and the fix.
  void validate() const;
};

}  // namespace fsdp
