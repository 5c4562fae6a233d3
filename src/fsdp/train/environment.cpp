#include "fsdp/train/environment.h"

#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <torch/headeronly/version.h>

#include <array>
#include <chrono>
#include <string>
#include <string_view>
#include <thread>

#include "fsdp/base/text.h"
#include "fsdp/base/version.h"

namespace fsdp::train {

namespace {

// A function of CUDA's driver library, whose interface does not change: libtorch tells device names
// only to programs that are compiled with CUDA's headers.
template <typename Function>
Function driver_function(void* driver, const char* name) {
  return reinterpret_cast<Function>(::dlsym(driver, name));
}

// Calls a function of the driver for a device, which `call` gives its arguments; false: there is no
// such function or device.
template <typename Function, typename Call>
bool ask_driver(c10::Device device, const char* name, const Call& call) {
  if (!device.is_cuda()) return false;
  // Never closed, because libtorch uses the library, too.
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) return false;
  const auto start = driver_function<int (*)(unsigned)>(driver, "cuInit");
  const auto find = driver_function<int (*)(int*, int)>(driver, "cuDeviceGet");
  const auto ask = driver_function<Function>(driver, name);
  if (start == nullptr || find == nullptr || ask == nullptr) return false;
  int number = 0;
  return start(0) == 0 && find(&number, device.index()) == 0 && call(ask, number) == 0;
}

std::string device_text(c10::Device device) {
  const std::string name = device_name(device);
  return name.empty() ? device.str() : concat(device.str(), ", ", name);
}

// The peak rate that MFU refers to, and its source.
std::string peak_text(const RunPlan& plan) {
  const double peak = plan.resolved.peak_tflops.value_or(0);
  if (peak == 0) return "not known";
  return concat(peak, " TFLOP/s in ", name_of(plan.compute), " per device, ",
                plan.options.peak_tflops ? "as --peak-tflops says" : "by its name");
}

}  // namespace

std::string time_text(const char* format, std::time_t time) {
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof(text), format, &parts);
  return text;
}

std::string processor_text() {
  utsname system{};
  ::uname(&system);
  return concat(system.machine, ", ", counted_text(std::thread::hardware_concurrency(), "core"));
}

std::string device_name(c10::Device device) {
  std::array<char, 256> name{};
  const bool is_known =
      ask_driver<int (*)(char*, int, int)>(device, "cuDeviceGetName", [&](auto ask, int number) {
        return ask(name.data(), static_cast<int>(name.size()) - 1, number);
      });
  return is_known ? name.data() : "";
}

int64_t device_memory_bytes(c10::Device device) {
  size_t bytes = 0;
  const bool is_known = ask_driver<int (*)(size_t*, int)>(
      device, "cuDeviceTotalMem_v2", [&](auto ask, int number) { return ask(&bytes, number); });
  return is_known ? static_cast<int64_t>(bytes) : 0;
}

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
      {"workspace", report.workspace_bytes},
      {"pool", report.pool_bytes + report.reduction_bytes},
      {"offloaded", report.host_bytes},
  };
  for (MemoryRow& row : rows)
    for (const Kind& kind : kinds)
      if (row.kind == kind.name) row.measured_bytes = kind.bytes;
}

std::vector<EnvironmentRow> environment_rows(const Launch& launch, const RunPlan& plan,
                                             c10::Device device) {
  utsname system{};
  ::uname(&system);
  const bool are_threads = launch.size == 1;
  return {
      {"started", time_text("%Y-%m-%d %H:%M:%S UTC")},
      {"host", concat(system.nodename, ", ", system.sysname, " ", processor_text())},
      {"fsdp", FSDP_VERSION},
      {"libtorch", TORCH_VERSION},
      {"ranks", concat(plan.num_ranks, are_threads ? " in " : " by ",
                       are_threads ? "one process" : name_of(launch.launcher))},
      {"device", device_text(device)},
      {"peak", peak_text(plan)},
      {"threads", concat(at::get_num_threads(), " per rank")},
  };
}

}  // namespace fsdp::train
