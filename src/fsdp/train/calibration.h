// Measures the parts of models on this machine for forecasts of time: `fsdp plan --calibrate`.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/plan/rates.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::train {

// One rank's batch of a model, with the settings of a run: types, optimizer, offloading.
struct CalibratedRun {
  NamedModel model;
  TrainOptions options;
  int64_t rows = 0;
  int64_t sequence = 0;
};

struct CalibrationOptions {
  c10::Device device = c10::kCPU;
  int64_t threads = 1;   // of a rank on the host
  double seconds = 3.0;  // of the steps of one measurement, of which there are a few at least
  std::vector<CalibratedRun> runs = {};
  std::vector<int64_t> link_ranks = {};  // threads of this process
  // Gets a line about what is measured next, and about what could not be.
  std::function<void(const std::string&)> progress = {};
};

// Small models for a CPU, those of 110 M to 8 B parameters for a GPU.
std::vector<CalibratedRun> usual_runs(c10::Device device);

// Adds to what is known of the machine. A run that fails is left out, and the others are not lost.
Rates calibrate(const CalibrationOptions& options, Rates known = {});

}  // namespace fsdp::train
