// The machine of a run: the memory it has left beside what the ranks need on it, and the peak rates
// of its GPUs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/train/run_plan.h"

namespace fsdp::train {

// --- memory --------------------------------------------------------------------------------------

struct AvailableMemory {
  int64_t bytes = 0;
  std::string source;  // who says so
};

// The memory that programs can still take on this host: what the kernel has to give, or what the
// limits of this process's control groups (of a container, or a job) leave of it. nullopt: not
// known. Reads the files of Linux below `root`.
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

// --- GPUs ----------------------------------------------------------------------------------------

// A sentence about the GPUs of this host, by the driver's files below `root`, that a build without
// CUDA (for the reason `without_cuda`, "" for none) leaves idle; "" where there are none, or where
// CUDA_VISIBLE_DEVICES hides them.
std::string idle_gpus_text(const std::string& without_cuda, const std::string& root = "");

// --- peak rates ----------------------------------------------------------------------------------

// The type of matrix products. fp32 ones use TensorFloat32 where libtorch is allowed to.
enum class ProductType : uint8_t { kFloat32, kTensorFloat32, kBFloat16, kFloat16 };

// TFLOP/s of dense matrices, as the manufacturer publishes them; nullopt for a name that is not in
// the table, a part of a GPU (MIG), and a type that the GPU does not have.
std::optional<double> known_peak_tflops(std::string_view device_name, ProductType type);

}  // namespace fsdp::train
