// What a table of rates has beside the parts of steps: the host's part of whole steps, updates of
// what is offloaded, and collectives between ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/nn/config/model_config.h"
#include "fsdp/plan/rate_table.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

// A kind of step that the host asks for in its own way.
struct HostStep {
  const char* work;
  ModelConfig (*config)(int64_t layers);
  bool has_muon;
};

// "host step", "host step experts", "host step muon".
std::span<const HostStep> host_steps();

// Axis "layers". One rank trains a narrow Llama of so many layers as a run does, on so few tokens
// that a GPU is done before its host has asked for more.
RateGrid measure_host_steps(const WorkPlace& place, const HostStep& kind,
                            const std::vector<int64_t>& layers);

// "offloaded update": axis "elements", about those asked for. All of a model's state is on the
// host, in the engine's own chunks and memory.
RateGrid measure_offloaded_updates(const WorkPlace& place, const std::vector<int64_t>& elements);

struct LinkPoints {
  std::vector<int64_t> ranks = {};
  std::vector<int64_t> bytes = {};  // of the whole side
};

// "all_gather", "reduce_scatter", "all_reduce", "all_to_all": axes "ranks" and "bytes", fp32
// between threads of this process.
std::vector<RateGrid> measure_links(const LinkPoints& points);

}  // namespace fsdp::train
