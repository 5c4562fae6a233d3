#include "fsdp/train/calibration/calibration.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/utsname.h>
#include <torch/headeronly/version.h>

#include <chrono>
#include <ctime>
#include <exception>
#include <thread>

#include "fsdp/base/text.h"
#include "fsdp/train/calibration/call_timer.h"
#include "fsdp/train/environment.h"

namespace fsdp::train {

namespace {

std::string date_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", &parts);
  return text;
}

std::string host_text() {
  utsname system{};
  ::uname(&system);
  return concat(system.machine, ", ", counted_text(std::thread::hardware_concurrency(), "core"));
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// A long call makes a GPU as warm as a training does, which lowers its clock.
void warm_up(const WorkPlace& place) {
  if (place.device.is_cpu()) return;
  constexpr int64_t kSize = 8192;
  const at::Tensor numbers = some_numbers({kSize, kSize}, place);
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(3)) {
    for (int i = 0; i < 20; ++i) static_cast<void>(numbers.matmul(numbers));
    synchronize(place.device);
  }
}

class Calibration {
 public:
  explicit Calibration(const CalibrationOptions& options)
      : options_(options),
        place_{options.device, options.device.is_cpu() ? at::kFloat : at::kBFloat16},
        timer_(options.device, options.call_seconds) {}

  RateTable run() {
    table_ = {.machine = options_.device.is_cpu() ? host_text() : device_name(options_.device),
              .host = host_text(),
              .date = date_text(),
              .torch = TORCH_VERSION,
              .device = options_.device.is_cpu() ? "cpu" : "cuda",
              .threads = options_.threads,
              .cores = std::thread::hardware_concurrency()};
    warm_up(place_);
    if (!options_.host_layers.empty())
      for (const HostStep& kind : host_steps())
        attempt(kind.work, [&] {
          table_.grids.push_back(measure_host_steps(place_, kind, options_.host_layers));
        });
    const WorkSizes& sizes = options_.sizes;
    measure(product_works(place_, sizes));
    measure(attention_works(place_, sizes));
    measure(pass_works(place_, sizes));
    measure(code_works(place_, sizes));
    measure(update_works(place_, sizes, options_.threads));
    measure(expert_works(place_, sizes));
    if (!options_.offloaded_elements.empty())
      attempt("offloaded update", [&] {
        table_.grids.push_back(measure_offloaded_updates(place_, options_.offloaded_elements));
      });
    if (!options_.links.ranks.empty())
      attempt("links", [&] {
        for (RateGrid& grid : measure_links(options_.links))
          table_.grids.push_back(std::move(grid));
      });
    return std::move(table_);
  }

 private:
  void attempt(const std::string& what, const std::function<void()>& measuring) {
    say(what);
    try {
      measuring();
    } catch (const std::exception& error) {
      say(concat("  left out: ", first_line(error.what())));
    }
    if (!options_.device.is_cpu()) c10::getDeviceAllocator(options_.device.type())->emptyCache();
  }

  void measure(const std::vector<MeasuredWork>& works) {
    for (const MeasuredWork& work : works)
      attempt(work.name, [&] {
        RateGrid grid{.work = work.name, .axes = work.axes, .points = work.points, .us = {}};
        std::vector<int64_t> sizes;
        measure_axis(work, sizes, grid.us);
        table_.grids.push_back(std::move(grid));
      });
  }

  void measure_axis(const MeasuredWork& work, std::vector<int64_t>& sizes,
                    std::vector<double>& us) {
    if (sizes.size() == work.points.size()) {
      us.push_back(timer_.us([&] { return work.prepare(sizes); }));
      return;
    }
    for (const int64_t size : work.points[sizes.size()]) {
      sizes.push_back(size);
      measure_axis(work, sizes, us);
      sizes.pop_back();
    }
  }

  void say(const std::string& line) const {
    if (options_.progress) options_.progress(line);
  }

  const CalibrationOptions& options_;
  const WorkPlace place_;
  const CallTimer timer_;
  RateTable table_;
};

}  // namespace

CalibrationOptions usual_calibration(c10::Device device) {
  CalibrationOptions options{.device = device};
  if (device.is_cpu()) {
    options.call_seconds = 0.03;
    options.sizes = {.tokens = {64, 256, 1024},
                     .widths = {64, 192, 256, 512, 1024},
                     .head_width = 0,
                     .code_tokens = {},
                     .code_widths = {},
                     .elements = {1 << 10, 1 << 14, 1 << 18, 1 << 21},
                     .update_elements = {1 << 12, 1 << 16, 1 << 20, 1 << 22},
                     .attention_rows = {4, 16},
                     .sequences = {32, 128, 512},
                     .head_dims = {32, 64},
                     .experts = {4, 16},
                     .expert_rows = {64, 512, 4096},
                     .expert_widths = {64, 256}};
    options.offloaded_elements = {1 << 18, 1 << 21};
    options.links = {.ranks = {2, 4}, .bytes = {1 << 10, 1 << 14, 1 << 18, 1 << 22}};
    return options;
  }
  options.call_seconds = 0.002;
  options.threads = std::thread::hardware_concurrency();
  options.sizes = {.tokens = {512, 2048, 4096, 8192, 16384},
                   .widths = {256, 768, 1536, 2048, 4096, 5632, 8192, 14336},
                   .head_width = 32768,
                   .code_tokens = {2048, 8192, 16384},
                   .code_widths = {256, 1024, 2048, 4096, 8192, 14336},
                   .elements = {1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26},
                   .update_elements = {1 << 18, 1 << 22, 1 << 26},
                   .attention_rows = {16, 64, 256},
                   .sequences = {512, 1024, 2048, 4096, 8192},
                   .head_dims = {64, 128},
                   .experts = {8, 32, 128},
                   .expert_rows = {512, 2048, 8192, 32768, 131072},
                   .expert_widths = {768, 2048, 4096}};
  options.host_layers = {4, 24};
  options.offloaded_elements = {1 << 23, 1 << 26};
  return options;
}

RateTable calibrate(const CalibrationOptions& options) { return Calibration(options).run(); }

}  // namespace fsdp::train
