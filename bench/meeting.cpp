// Processes of one host meet over TCP, as torchrun's do, and agree on a mesh; how long that takes
// and how many connections each holds then. They are copies of this process: a thousand that load
// libtorch each would need more memory than a host has.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/comm/tcp/tcp_connection.h"
#include "fsdp/comm/world.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A rank tells the first process this.
struct Report {
  int rank = 0;
  double met_after = 0;  // seconds after the first process began
  double barrier = 0;
  double mesh = 0;
  int sockets = 0;
};

int count_sockets() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry, gone).string().rfind("socket:", 0) == 0) ++count;
  }
  return count;
}

void run_rank(int rank, int host_ranks, Clock::time_point begin, int to_first) {
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  const std::string host = "host " + std::to_string(rank / host_ranks);
  ::setenv("NCCL_HOSTID", host.c_str(), 1);
  fsdp::World world = fsdp::World::from_environment({.nccl = fsdp::NcclUse::kOff});
  Report report{.rank = rank, .met_after = seconds_since(begin)};
  auto part = Clock::now();
  world.communicator().barrier("bench").wait();
  report.barrier = seconds_since(part);
  part = Clock::now();
  const fsdp::Mesh mesh = world.mesh({.outer = world.size() / host_ranks});
  report.mesh = seconds_since(part);
  report.sockets = count_sockets();
  world.communicator().barrier("bench").wait();  // nobody closes a connection that is counted
  if (::write(to_first, &report, sizeof(report)) != sizeof(report)) std::perror("write");
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = 1000;
  int host_ranks = 8;
  CLI::App app("Processes that meet over TCP");
  app.add_option("--ranks", ranks, "How many")->check(CLI::Range(2, 4096))->capture_default_str();
  app.add_option("--host-ranks", host_ranks, "As if so many were on a host; divides --ranks")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (ranks % host_ranks != 0) {
    std::fprintf(stderr, "--host-ranks %d does not divide --ranks %d\n", host_ranks, ranks);
    return 2;
  }
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  at::set_num_threads(1);  // no thread may live while this process is copied
  const int port = fsdp::endpoint_of(fsdp::listen_at({"127.0.0.1", 0})).port;
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"})
    ::setenv(name, std::to_string(ranks).c_str(), 1);
  int ends[2];
  if (::pipe(ends) != 0) return 1;
  const auto begin = Clock::now();
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child < 0) {
      std::perror("fork");
      return 1;
    }
    if (child > 0) continue;
    ::close(ends[0]);
    try {
      run_rank(rank, host_ranks, begin, ends[1]);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }
  const double forked = seconds_since(begin);
  ::close(ends[1]);
  Report most;
  Report first;
  int num_reports = 0;
  for (Report report; ::read(ends[0], &report, sizeof(report)) == sizeof(report); ++num_reports) {
    most.met_after = std::max(most.met_after, report.met_after);
    most.barrier = std::max(most.barrier, report.barrier);
    most.mesh = std::max(most.mesh, report.mesh);
    if (report.rank == 0) {
      first = report;
    } else {
      most.sockets = std::max(most.sockets, report.sockets);
    }
  }
  while (::wait(nullptr) > 0) {
  }
  std::printf("# %d processes on one host, %d to each of %d supposed hosts\n", num_reports,
              host_ranks, ranks / host_ranks);
  std::printf("started within s  met after s  barrier s  mesh s  sockets of rank 0  of others\n");
  std::printf("%16.2f  %11.2f  %9.3f  %6.2f  %17d  %9d\n", forked, most.met_after, most.barrier,
              most.mesh, first.sockets, most.sockets);
  return num_reports == ranks ? 0 : 1;
}
