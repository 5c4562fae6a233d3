// Whole steps of the reference model, and collectives between ranks: what a table of rates has
// beside the parts of steps.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/plan/rate_table.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

enum class StepLaunch : uint8_t { kEager, kRecorded };

struct StepPoints {
  std::vector<int64_t> layers = {};
  std::vector<int64_t> sequences = {};  // of a step, beside the one of few tokens
  int steps = 10;                       // timed
};

// "step" or "recorded step": axes "layers" and "tokens". One rank.
RateGrid measure_steps(const WorkPlace& place, const StepPoints& points, StepLaunch launch);

struct LinkPoints {
  std::vector<int64_t> ranks = {};
  std::vector<int64_t> bytes = {};  // of the whole side
};

// "all_gather", "reduce_scatter", "all_reduce": axes "ranks" and "bytes", fp32 between threads of
// this process.
std::vector<RateGrid> measure_links(const LinkPoints& points);

}  // namespace fsdp::train
