// `fsdp plan --calibrate`: measures this machine for forecasts of time.
#pragma once

#include <optional>
#include <string>

#include "fsdp/train/calibration.h"

namespace fsdp::cli {

struct CalibrateArguments {
  std::string file;     // as typed
  std::string device;   // "": a GPU if there is one
  std::string threads;  // "": one for a CPU, all of a GPU's host
};

// Measures a run, or the usual ones, adds them to the file's rates if there are any, and says on
// standard error what it measures. UsageError before it begins.
void calibrate_machine(const CalibrateArguments& given,
                       const std::optional<train::CalibratedRun>& run);

}  // namespace fsdp::cli
