// `fsdp plan --calibrate`: measures this machine for forecasts of time.
#pragma once

#include <string>

namespace fsdp::cli {

struct CalibrateArguments {
  std::string file;     // as typed
  std::string device;   // "": a GPU if there is one
  std::string threads;  // "": one for a CPU, all of a GPU's host
};

// Writes the table, and says on standard error what it measures. UsageError before it begins.
void calibrate_machine(const CalibrateArguments& given);

}  // namespace fsdp::cli
