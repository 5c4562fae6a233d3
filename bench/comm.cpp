// How fast a communicator moves and sums CPU tensors: `threads` beside a plain memcpy by as many
// threads or, started by a launcher as several processes, theirs. Results are checked in the same
// run. bench/comm.py runs this beside gloo, bench/processes.py over TCP and MPI.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Row {
  std::string operation;
  int64_t bytes = 0;  // of the whole, unsharded side
  double microseconds = 0;

  double gigabytes_per_second() const { return static_cast<double>(bytes) / microseconds * 1e-3; }
};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The best of several batches: other programs on the machine can only make a batch slower.
template <typename Body>
double best_microseconds(int64_t bytes, Body body) {
  const int calls =
      static_cast<int>(std::clamp<int64_t>((int64_t{64} << 20) / (bytes + 1), 4, 2000));
  body();
  double best = 1e30;
  for (int batch = 0; batch < 7; ++batch) {
    const auto begin = Clock::now();
    for (int call = 0; call < calls; ++call) body();
    best = std::min(best, seconds_since(begin) / calls * 1e6);
  }
  return best;
}

// Every rank fills with its own number, so that the result shows whose data arrived.
Row time_all_gather(fsdp::Communicator& comm, int64_t bytes) {
  const int64_t numel = bytes / 4 / comm.size();
  const at::Tensor input = at::full({numel}, static_cast<double>(comm.rank() + 1), at::kFloat);
  at::Tensor output = at::zeros({numel * comm.size()}, at::kFloat);
  const double time =
      best_microseconds(bytes, [&] { comm.all_gather(output, input, "bench").wait(); });
  for (int rank = 0; rank < comm.size(); ++rank)
    FSDP_CHECK((output.narrow(0, rank * numel, numel) == rank + 1).all().item<bool>(),
               "all_gather of ", bytes, " bytes is wrong");
  return {"all_gather", bytes, time};
}

Row time_reduce_scatter(fsdp::Communicator& comm, int64_t bytes, at::ScalarType wire,
                        const char* name) {
  const int64_t numel = bytes / c10::elementSize(wire) / comm.size();
  const at::Tensor input =
      at::full({numel * comm.size()}, static_cast<double>(comm.rank() + 1), wire);
  at::Tensor output = at::zeros({numel}, at::kFloat);
  const double time =
      best_microseconds(bytes, [&] { comm.reduce_scatter(output, input, {}, "bench").wait(); });
  const int expected = comm.size() * (comm.size() + 1) / 2;
  FSDP_CHECK((output == expected).all().item<bool>(), name, " of ", bytes, " bytes is wrong");
  return {name, bytes, time};
}

// The machine's best: each thread copies as much as a rank of an all_gather writes.
Row time_memcpy(int threads, int64_t bytes) {
  std::vector<std::vector<char>> from(static_cast<size_t>(threads));
  std::vector<std::vector<char>> to(static_cast<size_t>(threads));
  std::vector<double> times(static_cast<size_t>(threads));
  std::atomic<int> waiting{0};
  const auto copy = [&](size_t thread) {
    from[thread].assign(static_cast<size_t>(bytes), 1);
    to[thread].assign(static_cast<size_t>(bytes), 0);
    ++waiting;
    while (waiting < threads) std::this_thread::yield();
    times[thread] = best_microseconds(bytes, [&] {
      std::memcpy(to[thread].data(), from[thread].data(), static_cast<size_t>(bytes));
    });
  };
  std::vector<std::thread> workers;
  for (int thread = 0; thread < threads; ++thread) workers.emplace_back(copy, thread);
  for (std::thread& worker : workers) worker.join();
  return {"memcpy", bytes, *std::max_element(times.begin(), times.end())};
}

std::vector<Row> time_communicator(fsdp::Communicator& comm, const std::vector<int64_t>& sizes) {
  std::vector<Row> rows;
  for (const int64_t bytes : sizes) {
    rows.push_back(time_all_gather(comm, bytes));
    rows.push_back(time_reduce_scatter(comm, bytes, at::kFloat, "reduce_scatter fp32"));
    rows.push_back(time_reduce_scatter(comm, bytes, at::kBFloat16, "reduce_scatter bf16 wire"));
  }
  return rows;
}

std::vector<Row> run_as_threads(int ranks, const std::vector<int64_t>& sizes) {
  std::vector<Row> rows;
  for (const int64_t bytes : sizes) rows.push_back(time_memcpy(ranks, bytes));
  fsdp::run_threads(ranks, {}, [&](fsdp::World& world) {
    const std::vector<Row> mine = time_communicator(world.communicator(), sizes);
    if (world.rank() == 0) rows.insert(rows.end(), mine.begin(), mine.end());
  });
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Rates of a communicator, beside memcpy if its ranks are threads", "bench_comm"};
  int ranks = 2;
  std::string format = "text";
  std::vector<int64_t> sizes = {1 << 10, 32 << 10, 1 << 20, 32 << 20, 64 << 20};
  app.add_option("--ranks", ranks, "ranks, each a thread; ignored under mpirun and torchrun")
      ->check(CLI::Range(1, 64));
  app.add_option("--bytes", sizes, "sizes of the whole side, in bytes");
  app.add_option("--format", format, "text or json")->check(CLI::IsMember({"text", "json"}));
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);  // the ranks are the parallelism

  std::vector<Row> rows;
  const fsdp::Launch launch = fsdp::read_launch();
  const bool as_threads = launch.size == 1;
  if (as_threads) {
    rows = run_as_threads(ranks, sizes);
  } else {
    fsdp::World world = fsdp::World::from_environment();
    rows = time_communicator(world.communicator(), sizes);
    ranks = world.size();
    if (world.rank() != 0) return 0;
  }
  if (format == "json") {
    nlohmann::json out = nlohmann::json::array();
    for (const Row& row : rows)
      out.push_back({{"operation", row.operation}, {"bytes", row.bytes}, {"us", row.microseconds}});
    std::puts(out.dump().c_str());
    return 0;
  }
  std::printf("# %d ranks as %s, best of 7 batches; GB/s = bytes of the whole side / time\n", ranks,
              as_threads ? "threads" : fsdp::name_of(launch.launcher));
  std::printf("%-26s %12s %12s %10s\n", "# operation", "bytes", "us", "GB/s");
  for (const Row& row : rows)
    std::printf("%-26s %12lld %12.2f %10.2f\n", row.operation.c_str(),
                static_cast<long long>(row.bytes), row.microseconds, row.gigabytes_per_second());
  std::puts("# result: OK");
  return 0;
}
