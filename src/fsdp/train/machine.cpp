#include "fsdp/train/machine.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp::train {

namespace {

// The two forms of control groups that Linux has.
struct CgroupFiles {
  const char* controller;  // of its line in /proc/self/cgroup
  const char* base;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // of memory.stat: pages of files, which the kernel gives up for others
};
constexpr std::array<CgroupFiles, 2> kCgroups = {
    {{"", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"},
     {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
      "total_inactive_file"}}};

// The number after a word at the beginning of a line, or the file's first; nullopt: there is none.
std::optional<int64_t> number_in(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream parts(line);
    std::string first;
    if (!word.empty() && !(parts >> first && first == word)) continue;
    int64_t number = 0;
    if (parts >> number) return number;
    if (word.empty()) break;
  }
  return std::nullopt;
}

// The path of this process below a controller's base: "9:memory:/job/7".
std::optional<std::string> cgroup_path(const std::string& root, const std::string& controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    if (line.substr(first + 1, second - first - 1) == controller) return line.substr(second + 1);
  }
  return std::nullopt;
}

// The memory that the limit of one group leaves.
std::optional<int64_t> left_in_group(const std::string& directory, const CgroupFiles& files) {
  const std::optional<int64_t> limit = number_in(concat(directory, "/", files.limit), "");
  const std::optional<int64_t> usage = number_in(concat(directory, "/", files.usage), "");
  if (!limit || !usage) return std::nullopt;  // "max" is no number
  const int64_t files_bytes = number_in(directory + "/memory.stat", files.reclaimable).value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *usage - files_bytes));
}

MemoryCheck check_of(std::string where, int64_t num_ranks, int64_t bytes_of_rank,
                     AvailableMemory available) {
  return {.where = std::move(where),
          .num_ranks = num_ranks,
          .needed_bytes = checked_mul(num_ranks, bytes_of_rank),
          .has_activations = false,
          .available = std::move(available)};
}

}  // namespace

std::optional<AvailableMemory> available_host_memory(const std::string& root) {
  std::optional<AvailableMemory> least;
  const auto consider = [&](std::optional<int64_t> bytes, const char* source) {
    if (bytes && (!least || *bytes < least->bytes)) least = {*bytes, source};
  };
  constexpr int64_t kKiB = 1024;
  if (const auto kibibytes = number_in(root + "/proc/meminfo", "MemAvailable:"))
    consider(*kibibytes * kKiB, "MemAvailable of /proc/meminfo");
  for (const CgroupFiles& files : kCgroups) {
    std::optional<std::string> path = cgroup_path(root, files.controller);
    // A group is limited by all those around it. In a container the outer part of the path may not
    // be visible, and its last directory is the base.
    while (path) {
      consider(left_in_group(concat(root, files.base, *path == "/" ? "" : *path), files),
               "the limit of its control group");
      if (path->empty() || *path == "/") break;
      path = path->substr(0, path->rfind('/'));
    }
  }
  return least;
}

std::string MemoryCheck::text() const {
  return concat("memory of ", where, ": ", counted_text(num_ranks, "rank"),
                num_ranks == 1 ? " needs " : " need ", bytes_text(needed_bytes),
                has_activations ? "" : " without activations", ", ", bytes_text(available.bytes),
                " are available (", available.source, ")", fits() ? "" : ": does not fit");
}

std::vector<MemoryCheck> memory_checks(const RunPlan& plan, const RanksHere& ranks,
                                       const std::string& device, int64_t device_bytes,
                                       const std::optional<AvailableMemory>& host) {
  const MemoryBytes& bytes = plan.forecast.bytes;
  std::vector<MemoryCheck> checks;
  int64_t on_host = bytes.host.total();
  if (device_bytes > 0) {
    checks.push_back(check_of(device, ranks.of_device,
                              plan.peak ? plan.peak->total() : bytes.total(),
                              {device_bytes, "the whole memory of the device"}));
    checks.back().has_activations = plan.peak.has_value();
  } else {
    on_host = checked_add(on_host, bytes.total());
  }
  if (host && on_host > 0) checks.push_back(check_of("this host", ranks.of_host, on_host, *host));
  return checks;
}

// --- GPUs ----------------------------------------------------------------------------------------

std::string idle_gpus_text(const std::string& without_cuda, const std::string& root) {
  const std::string gpus = root + "/proc/driver/nvidia/gpus";
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const bool are_hidden = visible != nullptr && *visible == '\0';
  if (without_cuda.empty() || are_hidden || !is_directory(gpus)) return "";
  const auto count = static_cast<int64_t>(names_in(gpus).size());
  if (count == 0) return "";
  return concat(
      "this host has ", counted_text(count, "NVIDIA GPU"), ", but this build is without CUDA (",
      without_cuda,
      ") and trains on the CPU; build with a CUDA build of libtorch, as docs/gpu.md shows");
}

// --- peak rates ----------------------------------------------------------------------------------

namespace {

// From data sheets. Most print figures "with sparsity", which are halved here; those of GeForce and
// RTX cards are for sums in fp32, as cuBLAS computes. 0: the GPU has no such instructions.
struct PeakRates {
  std::string_view names;  // a pattern, without "NVIDIA "
  double fp32;
  double tf32;
  double bf16;
  double fp16;
};

constexpr PeakRates kPeakRates[] = {
    {"Tesla V100-SXM2-??GB", 15.7, 0, 0, 125},
    {"Tesla V100-PCIE-??GB", 14, 0, 0, 112},
    {"Tesla T4", 8.1, 0, 0, 65},
    {"A100-SXM4-??GB", 19.5, 156, 312, 312},
    {"A100-PCIE-40GB", 19.5, 156, 312, 312},
    {"A100 80GB PCIe", 19.5, 156, 312, 312},
    {"A800-SXM4-80GB", 19.5, 156, 312, 312},
    {"A800 80GB PCIe", 19.5, 156, 312, 312},
    {"A10", 31.2, 62.5, 125, 125},
    {"A30", 10.3, 82, 165, 165},
    {"A40", 37.4, 74.8, 149.7, 149.7},
    {"RTX A6000", 38.7, 77.4, 154.8, 154.8},
    {"GeForce RTX 3090", 35.6, 35.6, 71, 71},
    {"L4", 30.3, 60, 121, 121},
    {"L40", 90.5, 90.5, 181.05, 181.05},
    {"L40S", 91.6, 183, 362.05, 362.05},
    {"GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2},
    {"H100 80GB HBM3", 67, 494.7, 989.4, 989.4},
    {"H100 PCIe", 51, 378, 756, 756},
    {"H100 NVL", 60, 417.5, 835, 835},
    {"H800", 67, 494.7, 989.4, 989.4},
    {"H800 PCIe", 51, 378, 756, 756},
    {"H200", 67, 494.7, 989.4, 989.4},
    {"H200 NVL", 60, 417.5, 835, 835},
    {"GH200 480GB", 67, 494.7, 989.4, 989.4},
    {"GH200 144G HBM3e", 67, 494.7, 989.4, 989.4},
    {"H20", 44, 74, 148, 148},
    {"B200", 75, 1100, 2250, 2250},
    {"GB200", 80, 1250, 2500, 2500},
    {"GeForce RTX 5090", 104.8, 104.8, 209.5, 209.5},
};

double rate_of(const PeakRates& rates, ProductType type) {
  switch (type) {
    case ProductType::kFloat32:
      return rates.fp32;
    case ProductType::kTensorFloat32:
      return rates.tf32;
    case ProductType::kBFloat16:
      return rates.bf16;
    case ProductType::kFloat16:
      return rates.fp16;
  }
  FSDP_ASSERT(false, "no such type");
}

}  // namespace

std::optional<double> known_peak_tflops(std::string_view device_name, ProductType type) {
  // Drivers before 2021 omit the maker.
  constexpr std::string_view kMaker = "NVIDIA ";
  if (device_name.starts_with(kMaker)) device_name.remove_prefix(kMaker.size());
  for (const PeakRates& rates : kPeakRates) {
    // Matches the whole name: a GPU with one more word (MIG, Laptop, D) is slower.
    if (!matches_glob(rates.names, device_name)) continue;
    const double rate = rate_of(rates, type);
    return rate > 0 ? std::optional(rate) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace fsdp::train
