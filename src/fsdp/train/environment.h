// Where a run runs: names of devices, peak memory, and the facts of the machine that log and report
// keep, so that figures can be compared later.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "fsdp/comm/launch.h"
#include "fsdp/shard/sharded.h"
#include "fsdp/train/log/run_records.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::train {

// --- names of devices ----------------------------------------------------------------------------

// "NVIDIA H200"; "" for CPUs, and where the driver does not say.
std::string device_name(c10::Device device);

// All memory of a GPU; 0 for CPUs, and where the driver does not say.
int64_t device_memory_bytes(c10::Device device);

// --- memory --------------------------------------------------------------------------------------

// On a GPU: the most that libtorch's allocator has handed out. On a CPU: the most memory of this
// process, with all its ranks and libraries.
int64_t peak_memory_bytes(c10::Device device);

void add_measured(std::vector<MemoryRow>& rows, const MemoryReport& report);

// --- environment ---------------------------------------------------------------------------------

// A time (now) in UTC, as strftime() writes it.
std::string time_text(const char* format, std::time_t time = std::time(nullptr));

// "x86_64, 2 cores"
std::string processor_text();

std::vector<EnvironmentRow> environment_rows(const Launch& launch, const RunPlan& plan,
                                             c10::Device device);

}  // namespace fsdp::train
