// Measures this machine for forecasts of time: `fsdp plan --calibrate`.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/plan/rate_table.h"
#include "fsdp/train/calibration/measured_steps.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

struct CalibrationOptions {
  c10::Device device = c10::kCPU;
  int64_t threads = 1;        // of a rank on the host
  double call_seconds = 0.0;  // of one measurement, about
  WorkSizes sizes = {};
  std::vector<int64_t> host_layers = {};  // none: the host computes itself
  std::vector<int64_t> offloaded_elements = {};
  LinkPoints links = {};
  // Gets a line about what is measured next, and about what could not be.
  std::function<void(const std::string&)> progress = {};
};

// Sizes of models that a GPU or a CPU trains; a minute or so.
CalibrationOptions usual_calibration(c10::Device device);

// A kind of work that cannot be measured is left out, and the others are not lost.
RateTable calibrate(const CalibrationOptions& options);

}  // namespace fsdp::train
