// What an optimizer knows that changes from step to step: on the model's device, so that a step
// never waits for the host and can be replayed by a graph.
#pragma once

#include <cstdint>

namespace fsdp {

// Plain bytes: a device kernel writes it, and the host copies it when somebody asks.
struct StepState {
  // --- set by the host before a step ---
  double learning_rate = 0.0;

  // --- kept from step to step ---
  int64_t step = 0;          // updates that were made
  int64_t skipped = 0;       // steps that were left out because a gradient was NaN or Inf
  double beta1_power = 1.0;  // beta1 ^ step, as a running product
  double beta2_power = 1.0;
  double loss_scale = 1.0;  // what losses are multiplied by, and gradients divided by again
  int64_t good_steps = 0;   // since the loss scale was changed

  // --- of this step ---
  double squared_norm = 0.0;     // of all gradients of all ranks, as they lie in memory
  double norm = 0.0;             // of the gradients without the loss scale, before clipping
  float gradient_factor = 1.0f;  // every gradient is multiplied by this: unscaled and clipped
  int32_t skips = 0;             // 1: this step changes nothing
};

// What decides how a step begins; the same for all steps.
struct StepRule {
  double beta1 = 0.9;  // of optimizers that correct a bias; others leave them alone
  double beta2 = 0.999;
  double max_norm = 0.0;         // gradients are clipped to this norm; 0: they are not
  bool skips_nonfinite = false;  // a step with a NaN or Inf among the gradients changes nothing
  // Dynamic loss scaling: after a skipped step the scale is multiplied by `backoff`, after
  // `growth_interval` good ones by `growth`. Both 1: the scale is static.
  double growth = 1.0;
  double backoff = 1.0;
  int64_t growth_interval = 2000;
  double min_scale = 1.0;  // a model that is broken for good would drive it to 0
  double max_scale = 16777216.0;
};

}  // namespace fsdp
