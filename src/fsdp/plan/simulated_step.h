// A rank's step on a clock: computing, gathering, reducing and updating, in the engine's own order
// (shard/engine/schedule.h) and with its own waits (docs/engine.md, "One step").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/memory/live_trace.h"

namespace fsdp {

// The times of one unit, in microseconds.
struct UnitTimes {
  std::string name;
  double forward = 0;   // computing
  double backward = 0;  // with what is computed again
  // Collectives inside its layers, for which computing waits.
  double exchange_forward = 0;
  double exchange_backward = 0;
  // Until the host has asked for them; 0 for a recorded step, and where the host computes itself.
  double host_forward = 0;
  double host_backward = 0;
  double gather = 0;         // whenever the schedule gathers the unit
  double refresh = 0;        // once in a step, with the first gather after an update
  double reduce = 0;         // after every backward
  double reduce_at_end = 0;  // after the last backward of a step, too
  // The reductions over the outer axis, which has communicators of its own.
  double reduce_over_outer = 0;
  double update = 0;   // where the model computes
  double offload = 0;  // of what is on the host: both copies and the update
};

struct StepTimes {
  std::vector<UnitTimes> units;
  StepOrder order;  // of one microbatch
  int64_t prefetch = 1;
  int64_t microbatches = 1;
  double between = 0;      // the norm, and what else begins an update
  double host_update = 0;  // until the host has asked for updates
  // Whether updates run beside computing, or take turns with it.
  bool updates_beside = false;
};

enum class StepRow : uint8_t { kCompute, kExchange, kGather, kReduce, kUpdate };
const char* name_of(StepRow row);

struct StepSpan {
  StepRow row = StepRow::kCompute;
  double begin = 0;  // microseconds since the step began
  double end = 0;
  std::string label;
};

// A step in the middle of a run: what one step leaves for the next is in it.
struct SimulatedStep {
  double us = 0;
  std::vector<StepSpan> spans;
  // How long each row works.
  double compute = 0;
  double exchange = 0;  // with nothing beside it
  double gather = 0;
  double reduce = 0;
  double update = 0;
  // How long computing waits, by what it waits for.
  double exposed_gather = 0;
  double exposed_reduce = 0;
  double exposed_update = 0;
  double exposed_host = 0;
};

SimulatedStep simulate(const StepTimes& times);

}  // namespace fsdp
