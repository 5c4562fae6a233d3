#include "support/dropped_tensors_case.h"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <optional>
#include <vector>

#include "fsdp/comm/communicator.h"

namespace fsdp::testing {

namespace {

c10::Stream another_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
}

// Holds a communicator's device stream, and everything enqueued on it, for some 100 ms while the
// callers' own streams go on.
class HeldUp {
 public:
  HeldUp(Communicator& comm, at::Device device) : stream_(another_stream(device)) {
    const c10::StreamGuard guard(stream_);
    gate_ = at::zeros({1}, at::device(device).dtype(at::kFloat));
    const at::Tensor matrix = at::ones({8192, 8192}, gate_.options().dtype(at::kBFloat16));
    at::mm(matrix, matrix);  // loads the kernel and takes the memory
    comm.barrier("all is prepared").wait();
    if (comm.rank() == 0)  // the others' streams wait for this one's part
      for (int i = 0; i < 80; ++i) at::mm(matrix, matrix);
    end_.record(stream_);
    work_ = comm.all_reduce(gate_, {}, "hold up");
  }

  bool is_over() const { return end_.query(); }

 private:
  const c10::Stream stream_;
  at::Tensor gate_;
  c10::Event end_{stream_.device_type()};
  Work work_;
};

// How a test treats the Work of an operation whose tensors it drops at once.
enum class WorkIs { kDropped, kHeld, kWaitedForElsewhere };

class DroppedTensors {
 public:
  DroppedTensors(Communicator& comm, at::Device device)
      : comm_(comm),
        device_(device),
        numel_((device.is_cpu() ? 12000 : kOwnBlock) / comm.size() * comm.size()) {
    if (!device.is_cpu()) elsewhere_ = another_stream(device);
  }

  // Sends this rank's number to all ranks. Returns the tensor that receives all numbers.
  at::Tensor exchange(WorkIs work_is) {
    const at::Tensor input = filled(comm_.rank() + 1);
    at::Tensor output = filled(0);
    Work work = comm_.all_to_all(output, input, "dropped");
    if (work_is == WorkIs::kHeld) held_.push_back(work);
    if (work_is == WorkIs::kWaitedForElsewhere && elsewhere_) {
      const c10::StreamGuard guard(*elsewhere_);
      work.wait();
    }
    return output;
  }

  at::Tensor filled(int number) const {
    return at::full({numel_}, number, at::device(device_).dtype(at::kFloat));
  }

  bool is_everybodys(const at::Tensor& output) const {
    const at::Tensor shares = output.view({comm_.size(), -1});
    const at::Tensor numbers = at::arange(1, comm_.size() + 1, output.options());
    return (shares == numbers.unsqueeze(1)).all().item<bool>();
  }

 private:
  // 12 MiB: libtorch's allocator neither cuts such tensors from larger blocks nor merges them.
  static constexpr int64_t kOwnBlock = 3 << 20;

  Communicator& comm_;
  const at::Device device_;
  const int64_t numel_;
  std::optional<c10::Stream> elsewhere_;
  std::vector<Work> held_;
};

// Leaves a device's allocator with this many blocks for each rank, and no others. It gives out the
// lowest first, so it gives out a dropped block next, and does not ask the driver, which may wait.
void cache_blocks(Communicator& comm, const DroppedTensors& tensors, at::Device device, int count) {
  comm.barrier("nothing is in use").wait();
  c10::getDeviceAllocator(device.type())->emptyCache();
  comm.barrier("nothing is cached").wait();
  std::vector<at::Tensor> cached;
  for (int i = 0; i < count; ++i) cached.push_back(tensors.filled(0));
  comm.barrier("all have theirs").wait();  // ranks that are threads share the allocator
}

// Drops the input of each operation before it is read, and the output of every second one, too.
// Another allocation of the same size must not get their memory: its writes would be sent, or be
// overwritten by arriving data.
void keeps_tensors_that_were_dropped(World& world, at::Device device) {
  constexpr WorkIs kAll[] = {WorkIs::kDropped, WorkIs::kHeld, WorkIs::kWaitedForElsewhere};
  constexpr int kNumDropped = 3 * 3;
  Communicator& comm = world.communicator();
  DroppedTensors tensors(comm, device);
  tensors.exchange(WorkIs::kDropped);  // makes the communicator's own memory
  comm.all_reduce(tensors.filled(0), {}, "made").wait();
  std::optional<HeldUp> held_up;
  if (!device.is_cpu()) {
    cache_blocks(comm, tensors, device, 3 * kNumDropped);
    held_up.emplace(comm, device);
  }
  // Not if the host carries the data, since it then has waited for the device.
  comm.barrier("held up").wait();
  const bool is_held_up = held_up && comm.rank() == 0 && !held_up->is_over();

  std::vector<at::Tensor> outputs;
  for (const WorkIs work_is : kAll) {
    outputs.push_back(tensors.exchange(work_is));
    tensors.exchange(work_is);
  }
  comm.barrier("all have dropped them").wait();
  std::vector<at::Tensor> others;
  for (int i = 0; i < kNumDropped; ++i) others.push_back(tensors.filled(-1));
  if (is_held_up && held_up->is_over())
    std::printf("note: the host was slower than the device, so this run shows nothing\n");

  comm.all_reduce(tensors.filled(0), {}, "the last").wait();  // after all of them
  for (const at::Tensor& output : outputs) EXPECT_TRUE(tensors.is_everybodys(output));
  for (const at::Tensor& other : others) EXPECT_TRUE((other == -1).all().item<bool>());
}

}  // namespace

CommunicatorCase dropped_tensors_case() {
  return {"KeepsTensorsThatWereDropped", keeps_tensors_that_were_dropped};
}

}  // namespace fsdp::testing
