#include "fsdp/train/machine_memory.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>

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

// What the limit of one group leaves.
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
                num_ranks == 1 ? " needs " : " need ",
                bytes_text(static_cast<double>(needed_bytes)),
                has_activations ? "" : " without activations", ", ",
                bytes_text(static_cast<double>(available.bytes)), " are available (",
                available.source, ")", fits() ? "" : ": does not fit");
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

}  // namespace fsdp::train
