// `fsdp info`: describes this build and what it finds on this machine.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>

#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/base/torch_math.h"
#include "fsdp/base/version.h"
#include "fsdp/cli/command.h"
#include "fsdp/comm/backends.h"
#include "fsdp/comm/launch.h"
#include "fsdp/train/environment.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

// Where the loader found libtorch, which is not always where the build found it.
std::string libtorch_place() {
  Dl_info found{};
  const auto* symbol = reinterpret_cast<const void*>(&at::get_num_threads);
  if (dladdr(symbol, &found) == 0 || found.dli_fname == nullptr) return "unknown";
  const std::unique_ptr<char, decltype(&std::free)> path(::realpath(found.dli_fname, nullptr),
                                                         &std::free);
  return path ? directory_of(path.get()) : found.dli_fname;
}

Json backends() {
  Json names = {"threads"};
  if (mpi_available()) names.push_back("mpi");
  names.push_back("tcp");
  if (nccl_available()) names.push_back("nccl");
  names.push_back("simulated");
  return names;
}

Json devices() {
  Json found = Json::array();
  found.push_back(concat("cpu: ", std::thread::hardware_concurrency(), " hardware threads"));
  const auto num_cuda = at::detail::getCUDAHooks().deviceCount();
  for (int64_t i = 0; i < num_cuda; ++i) {
    const std::string name = train::device_name({c10::kCUDA, static_cast<c10::DeviceIndex>(i)});
    found.push_back(concat("cuda:", i, name.empty() ? "" : ": ", name));
  }
  return found;
}

// Shows a broken environment instead of throwing, because people use this command to find it.
Json ranks() try {
  const Launch launch = read_launch();
  return {{"launcher", name_of(launch.launcher)},
          {"rank", launch.rank},
          {"size", launch.size},
          {"local_rank", launch.local_rank},
          {"local_size", launch.local_size}};
} catch (const Error& error) {
  return {{"problem", error.what()}};
}

Json collect() {
  return {
      {"version", FSDP_VERSION},
      {"build_type", FSDP_BUILD_TYPE},
      {"compiler", FSDP_COMPILER},
      {"libtorch", {{"version", TORCH_VERSION}, {"place", libtorch_place()}}},
      {"math", torch_math_text()},
      {"backends", backends()},
      {"devices", devices()},
      {"ranks", ranks()},
  };
}

std::string words(const Json& list) {
  std::string text;
  for (const Json& word : list) text += (text.empty() ? "" : ", ") + word.get<std::string>();
  return text;
}

void print_info_table(const Json& info) {
  const auto row = [](const char* name, const std::string& value) {
    std::cout << std::left << std::setw(12) << name << value << "\n";
  };
  const Json& world = info["ranks"];
  row("fsdp", info["version"]);
  row("build",
      concat(info["build_type"].get<std::string>(), ", ", info["compiler"].get<std::string>()));
  row("libtorch", concat(info["libtorch"]["version"].get<std::string>(), ", ",
                         info["libtorch"]["place"].get<std::string>()));
  row("math", info["math"]);
  row("backends", words(info["backends"]));
  row("devices", words(info["devices"]));
  if (world.contains("problem")) return row("ranks", world["problem"]);
  row("ranks", concat("rank ", world["rank"].get<int>(), " of ", world["size"].get<int>(), " (",
                      world["launcher"].get<std::string>(), "), local rank ",
                      world["local_rank"].get<int>(), " of ", world["local_size"].get<int>()));
}

struct InfoOptions {
  bool json = false;
};

}  // namespace

Command add_info(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "info", "Show this build, its libtorch, communicator backends, devices and ranks");
  app->footer("Example:\n  fsdp info --json");
  const auto options = std::make_shared<InfoOptions>();
  app->add_flag("--json", options->json, "Print one JSON object instead of the table");
  return {app, [options] {
            const Json info = collect();
            if (options->json)
              std::cout << info.dump(2) << "\n";
            else
              print_info_table(info);
          }};
}

}  // namespace fsdp::cli
