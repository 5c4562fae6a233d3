#include "fsdp/cli/calibrate.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <iostream>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/cli/command.h"

namespace fsdp::cli {

namespace {

c10::Device device_of(const std::string& name) {
  const std::vector<std::string> names = {"auto", "cpu", "cuda"};
  const size_t choice = name.empty() ? 0 : parse_choice("--device", name, names);
  const bool has_gpu = at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0;
  if (choice == 2 && !has_gpu)
    throw UsageError(
        "--device is 'cuda', but there is no GPU here, or libtorch is built for CPUs alone; use "
        "--device cpu");
  return choice == 1 || !has_gpu ? c10::Device("cpu") : c10::Device("cuda:0");
}

}  // namespace

void calibrate_machine(const CalibrateArguments& given,
                       const std::optional<train::CalibratedRun>& run) {
  log_warnings_only();
  const c10::Device device = device_of(given.device);
  constexpr int64_t kMostThreads = 4096;
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  train::CalibrationOptions options{
      .device = device,
      .threads = given.threads.empty()
                     ? (device.is_cpu() ? 1 : cores)
                     : parse_whole_number("--threads", given.threads, 1, kMostThreads),
      .runs = run ? std::vector{*run} : train::usual_runs(device)};
  if (device.is_cpu()) options.link_ranks = {2, 4};
  if (is_directory(given.file))
    throw UsageError(
        concat("--calibrate is '", given.file, "', which is a directory; name a file in it"));
  make_directories(directory_of(given.file));
  const Rates known = path_exists(given.file) ? load_rates(given.file) : Rates{};
  // Fails now where the rates could not be written: measuring takes minutes.
  FileWriter(temporary_name_for(given.file));
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() -
                                                            begin)
        .count();
  };
  options.progress = [&](const std::string& line) {
    std::cerr << seconds() << " s  " << line << std::endl;  // seen at once
  };
  at::set_num_threads(static_cast<int>(options.threads));
  const Rates rates = train::calibrate(options, known);
  if (rates.parts.empty()) throw Error("nothing could be measured; the lines above say why");
  write_file_durably(given.file, rates_text(rates));
  std::cout << given.file << ": parts of "
            << counted_text(static_cast<int64_t>(rates.parts.size()), "model") << " on "
            << rates.machine << ", measured in " << seconds() << " s\n";
}

}  // namespace fsdp::cli
