// The host's part of whole steps, and collectives between ranks: what a table of rates has beside
// the parts of steps.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/plan/rate_table.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

// "host step": axis "layers". One rank trains a narrow Llama of so many layers on so few tokens
// that a GPU is done before its host has asked for more.
RateGrid measure_host_steps(const WorkPlace& place, const std::vector<int64_t>& layers);

struct LinkPoints {
  std::vector<int64_t> ranks = {};
  std::vector<int64_t> bytes = {};  // of the whole side
};

// "all_gather", "reduce_scatter", "all_reduce": axes "ranks" and "bytes", fp32 between threads of
// this process.
std::vector<RateGrid> measure_links(const LinkPoints& points);

}  // namespace fsdp::train
