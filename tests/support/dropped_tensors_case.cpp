#include "support/dropped_tensors_case.h"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <optional>
#include <vector>

namespace fsdp::testing {

namespace {

c10::Stream another_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
}

// Makes a communicator's device stream stand still for some 100 ms, and with it all that is
// enqueued meanwhile, while the callers' own streams go on.
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

// What becomes of the Work of an operation whose tensors go at once.
enum class WorkIs { kDropped, kHeld, kWaitedForElsewhere };

class DroppedTensors {
 public:
  DroppedTensors(Communicator& comm, at::Device device)
      : comm_(comm),
        device_(device),
        numel_((device.is_cpu() ? 12000 : kOwnBlock) / comm.size() * comm.size()) {
    if (!device.is_cpu()) elsewhere_ = another_stream(device);
  }

  // Sends this rank's number to everybody. Returns where everybody's will be.
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
  // 12 MiB: such tensors libtorch's allocator neither cuts from larger blocks nor merges.
  static constexpr int64_t kOwnBlock = 3 << 20;

  Communicator& comm_;
  const at::Device device_;
  const int64_t numel_;
  std::optional<c10::Stream> elsewhere_;
  std::vector<Work> held_;
};

// A device's allocator now has as many blocks for each rank, and no others, and gives out the
// lowest first: what is dropped is what it gives out next, and the driver, which may wait, is asked
// for nothing.
void cache_blocks(Communicator& comm, const DroppedTensors& tensors, at::Device device, int count) {
  comm.barrier("nothing is in use").wait();
  c10::getDeviceAllocator(device.type())->emptyCache();
  comm.barrier("nothing is cached").wait();
  std::vector<at::Tensor> cached;
  for (int i = 0; i < count; ++i) cached.push_back(tensors.filled(0));
  comm.barrier("all have theirs").wait();  // ranks that are threads share the allocator
}

// Of each operation the input goes while nobody has read it, of every second one the output, too.
// Whoever then asks for as much memory must not get theirs: what he writes would be sent, or be
// overwritten by what arrives.
void keeps_tensors_that_were_dropped(World& world, at::Device device) {
  constexpr WorkIs kAll[] = {WorkIs::kDropped, WorkIs::kHeld, WorkIs::kWaitedForElsewhere};
  constexpr int kNumDropped = 3 * 3;
  Communicator& comm = world.communicator();
  DroppedTensors tensors(comm, device);
  tensors.exchange(WorkIs::kDropped);  // makes what the communicator needs
  comm.all_reduce(tensors.filled(0), {}, "made").wait();
  std::optional<HeldUp> held_up;
  if (!device.is_cpu()) {
    cache_blocks(comm, tensors, device, 3 * kNumDropped);
    held_up.emplace(comm, device);
  }
  // Not where the host carries data: it has waited for the device.
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
