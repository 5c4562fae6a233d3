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

}  // namespace

std::vector<EnvironmentRow> environment_rows(const Launch& launch, int64_t num_ranks,
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
      {"ranks", concat(num_ranks, are_threads ? " in " : " by ",
                       are_threads ? "one process" : name_of(launch.launcher))},
      {"device", device.str()},
      {"threads", concat(at::get_num_threads(), " per rank")},
  };
}

}  // namespace fsdp::train
