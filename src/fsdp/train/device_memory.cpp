#include "fsdp/train/device_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

#include <string_view>

namespace fsdp::train {

int64_t peak_memory_bytes(c10::Device device) {
  if (device.is_cpu()) {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return int64_t{usage.ru_maxrss} * 1024;  // Linux counts in KiB
  }
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return at::getDeviceAllocator(device.type())
      ->getDeviceStats(device.index())
      .allocated_bytes[kAll]
      .peak;
}

void add_measured(std::vector<MemoryRow>& rows, const MemoryReport& report) {
  struct Kind {
    std::string_view name;
    int64_t bytes;
  };
  const Kind kinds[] = {
      {"weights", report.weight_bytes},
      {"main weights", report.main_weight_bytes},
      {"main gradients", report.main_grad_bytes},
      {"moments", report.moment_bytes},
      {"pool", report.pool_bytes + report.reduction_bytes},
      {"offloaded", report.host_bytes},
  };
  for (MemoryRow& row : rows)
    for (const Kind& kind : kinds)
      if (row.kind == kind.name) row.measured_bytes = kind.bytes;
}

}  // namespace fsdp::train
