// A job that goes wrong in the way its argument says; mpi_failures_test.py and tcp_failures_test.py
// check what it says then.
#include <ATen/ATen.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"

namespace {

using fsdp::World;

// The last rank does something else than the others.
bool is_odd_one(World& world) { return world.rank() == world.size() - 1; }

void disagree(World& world) {
  fsdp::Communicator& comm = world.communicator();
  comm.barrier("together").wait();
  if (is_odd_one(world)) {
    comm.all_reduce(at::ones({8}, at::kHalf), {}, "blocks.4").wait();
  } else {
    comm.all_gather(at::ones({8 * comm.size()}), at::ones({8}), "blocks.3").wait();
  }
}

void disagree_about_counts(World& world) {
  fsdp::Communicator& comm = world.communicator();
  const int64_t numel = is_odd_one(world) ? 9 : 8;
  comm.all_gather(at::ones({numel * comm.size()}), at::ones({numel}), "blocks.3").wait();
}

// The operation after a failed one of another communicator.
void follow(World& world) {
  const fsdp::Mesh mesh = world.mesh();
  fsdp::Communicator& comm = world.communicator();
  const int64_t numel = is_odd_one(world) ? 9 : 8;
  const at::Tensor whole = at::ones({numel * comm.size()});
  const fsdp::Work bad = comm.all_gather(whole, at::ones({numel}), "blocks.3");
  mesh.inner().reduce().all_reduce(at::ones({8}), {}, "blocks.4", bad).wait();
}

// The odd one believes that the work is done, and waits for the others at the end of the job.
void stay_away(World& world) {
  if (!is_odd_one(world)) world.communicator().barrier("blocks.3").wait();
}

void fail(World& world) {
  const fsdp::Mesh mesh = world.mesh();
  if (is_odd_one(world)) {
    const fsdp::Work pending = mesh.inner().gather().barrier("never");
    throw fsdp::Error("no space left for blocks.7");
  }
  mesh.inner().reduce().barrier("waits").wait();
}

// One of many collectives will find the odd one stopped or killed from outside.
void work_on(World& world) {
  fsdp::Communicator& comm = world.communicator();
  const at::Tensor whole = at::ones({(1 << 20) * comm.size()});
  comm.barrier("begins").wait();
  if (is_odd_one(world)) std::printf("pid %d\n", getpid());
  std::fflush(stdout);
  for (int step = 0; step < 1'000'000; ++step)
    comm.all_gather(whole, at::ones({1 << 20}), "blocks.3").wait();
}

void die(World& world) {
  if (is_odd_one(world)) std::_Exit(3);
  world.communicator().barrier("waits").wait();
}

const std::map<std::string, std::function<void(World&)>> kFailures = {
    {"disagree", disagree}, {"follow", follow}, {"counts", disagree_about_counts},
    {"away", stay_away},    {"fail", fail},     {"die", die},
    {"work", work_on},
};

}  // namespace

int main(int argc, char** argv) {
  const auto failure = kFailures.find(argc == 2 ? argv[1] : "");
  if (failure == kFailures.end()) return 2;
  std::optional<World> joined;
  try {
    joined.emplace(World::from_environment());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  World& world = *joined;
  try {
    failure->second(world);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[rank %d] %s\n", world.rank(), error.what());
    world.communicator().abort(fsdp::concat("rank ", world.rank(), " failed: ", error.what()));
    return 1;
  }
  return 0;
}
