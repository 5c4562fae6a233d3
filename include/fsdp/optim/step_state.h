// The numbers of an optimizer that change from step to step: on the model's device, so that a step
// never waits for the host and a graph can replay it.
#pragma once

#include <cstdint>

namespace fsdp {

// Plain bytes: a device kernel writes them, and the host copies them on request.
struct StepState {
  // --- set by the host before a step ---
  double learning_rate = 0.0;

  // --- kept from step to step ---
  int64_t step = 0;          // updates that were made
  int64_t skipped = 0;       // steps without an update because a gradient was NaN or Inf
  double beta1_power = 1.0;  // beta1 ^ step, as a running product
  double beta2_power = 1.0;
  double loss_scale = 1.0;  // losses are multiplied by it, and gradients divided by it again
  int64_t good_steps = 0;   // since the loss scale was changed

  // --- of this step ---
  double squared_norm = 0.0;     // of all gradients of all ranks, with the loss scale
  double norm = 0.0;             // of the gradients without the loss scale, before clipping
  float gradient_factor = 1.0f;  // unscales and clips every gradient
  int32_t skips = 0;             // 1: this step changes nothing
};

}  // namespace fsdp
