// What memory this machine has left, beside what the ranks of a run need on it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/train/run_plan.h"

namespace fsdp::train {

struct AvailableMemory {
  int64_t bytes = 0;
  std::string source;  // who says so
};

// What programs can still take on this host: what the kernel has to give, or what the limits of
// this process's control groups (of a container, or a job) leave of it. nullopt: not known. Reads
// the files of Linux below `root`.
std::optional<AvailableMemory> available_host_memory(const std::string& root = "");

// The ranks of a run that share this host, and those that share each of its devices.
struct RanksHere {
  int64_t of_host = 1;
  int64_t of_device = 1;
};

// One kind of memory: what is needed of it, and what there is.
struct MemoryCheck {
  std::string where;  // "this host", "cuda:0"
  int64_t num_ranks = 1;
  int64_t needed_bytes = 0;  // by all of them
  bool has_activations = false;
  AvailableMemory available;

  bool fits() const { return needed_bytes <= available.bytes; }
  // "memory of this host: 8 ranks need 128 GiB without activations, 22.9 GiB are available (...)"
  std::string text() const;
};

// For a device with so many bytes; 0: ranks compute on the host. Leaves out memory of which nothing
// is needed or known.
std::vector<MemoryCheck> memory_checks(const RunPlan& plan, const RanksHere& ranks,
                                       const std::string& device, int64_t device_bytes,
                                       const std::optional<AvailableMemory>& host);

}  // namespace fsdp::train
