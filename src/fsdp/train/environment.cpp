#include "fsdp/train/environment.h"

#include <ATen/Parallel.h>
#include <sys/utsname.h>
#include <torch/headeronly/version.h>

#include <chrono>
#include <ctime>
#include <string>
#include <thread>

#include "fsdp/base/text.h"
#include "fsdp/base/version.h"
#include "fsdp/train/device_name.h"

namespace fsdp::train {

namespace {

std::string time_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text;
}

std::string device_text(c10::Device device) {
  const std::string name = device_name(device);
  return name.empty() ? device.str() : concat(device.str(), ", ", name);
}

// What MFU is a part of, and who says so.
std::string peak_text(const RunPlan& plan) {
  const double peak = plan.resolved.peak_tflops.value_or(0);
  if (peak == 0) return "not known";
  return concat(peak, " TFLOP/s in ", name_of(plan.compute), " per device, ",
                plan.options.peak_tflops ? "as --peak-tflops says" : "by its name");
}

}  // namespace

std::vector<EnvironmentRow> environment_rows(const Launch& launch, const RunPlan& plan,
                                             c10::Device device) {
  utsname system{};
  ::uname(&system);
  const bool are_threads = launch.size == 1;
  return {
      {"started", time_text()},
      {"host", concat(system.nodename, ", ", system.sysname, " ", system.machine, ", ",
                      counted_text(std::thread::hardware_concurrency(), "core"))},
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
