// How long the tensors of an operation on a device are kept, and by whom: with a device that runs
// nothing and records its orders.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/comm/operation_queue.h"

namespace fsdp::tensors_in_use_test {
namespace {

using ::testing::IsSupersetOf;

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

const c10::Stream kCallers = stream_of(1);
const c10::Stream kAnother = stream_of(2);
const c10::Stream kCommunicators = stream_of(3);

// The allocator's notices, in order: this memory is used by that stream.
using Told = std::vector<std::pair<const void*, c10::Stream>>;

class Notes {
 public:
  static Notes& of_the_device() {
    static Notes notes;
    return notes;
  }
  void add(const void* memory, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    told_.emplace_back(memory, stream);
  }
  Told take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(told_, {});
  }

 private:
  std::mutex mutex_;  // protects the member below
  Told told_;
};

thread_local c10::Stream current_stream = kCallers;

struct NotingDevice final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return current_stream; }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return std::exchange(current_stream, stream);
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    ADD_FAILURE() << "a device that records a graph must not be asked";
    return false;
  }
  void synchronizeEvent(void*) const override { ADD_FAILURE() << "nobody waits for the device"; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    Notes::of_the_device().add(memory.get(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, NotingDevice);

// A tensor that only knows whether it is alive.
class Piece {
 public:
  Piece() {
    const auto note = [](void* is_held) { *static_cast<std::atomic<bool>*>(is_held) = false; };
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes_.size(),
                         c10::DataPtr(bytes_.data(), &is_held_, note, kDevice));
    tensor_ = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        caffe2::TypeMeta::Make<float>());
  }
  ~Piece() { EXPECT_FALSE(is_held_ && !tensor_.defined()) << "it outlives its memory"; }

  const at::Tensor& tensor() const { return tensor_; }
  const void* memory() const { return bytes_.data(); }
  void drop() { tensor_.reset(); }
  // By any holder.
  bool is_held() const { return is_held_; }

 private:
  std::array<char, 64> bytes_{};
  std::atomic<bool> is_held_{true};
  at::Tensor tensor_;
};

// Launches an operation or, on the host, runs all of it.
class Launcher final : public OperationRunner {
 public:
  std::optional<c10::Event> run(const std::shared_ptr<Operation>& operation) override {
    if (operation->on_device == nullptr) return std::nullopt;
    operation->on_device->runs_on = kCommunicators;
    c10::Event end(kDevice.type());
    end.record(kCommunicators);
    return end;
  }
  bool is_alone() const override { return false; }  // a thread of the queue's runs all of it
  void cancel() noexcept override {}
};

class OperationTensors : public ::testing::Test {
 protected:
  OperationTensors() { Notes::of_the_device().take(); }

  Operation operation(const Work& after = {}) {
    Operation operation;
    operation.print.kind = OpKind::kAllGather;
    operation.output = output_.tensor();
    operation.input = input_.tensor();
    operation.on_device = std::make_unique<OnDevice>(
        OnDevice{.called_on = kCallers, .ready = c10::Event(kDevice.type())});
    operation.on_device->ready.record(kCallers);
    operation.after = after;
    return operation;
  }
  void drop_tensors() {
    output_.drop();
    input_.drop();
  }
  Told both_used_by_the_communicator() const {
    return {{output_.memory(), kCommunicators}, {input_.memory(), kCommunicators}};
  }
  static Told told() { return Notes::of_the_device().take(); }
  // Also makes the queue's thread release the operations that it ran.
  void close_queue() { queue_.reset(); }

  Piece output_;
  Piece input_;
  Launcher launcher_;
  std::optional<OperationQueue> queue_{std::in_place, "world", launcher_, CommOptions{}};
};

TEST_F(OperationTensors, AreKeptByTheWorkAfterTheLaunch) {
  const Work work = queue_->push(operation());
  work.wait_as_follower();  // launched
  close_queue();
  drop_tensors();
  EXPECT_TRUE(output_.is_held());
  EXPECT_TRUE(input_.is_held());
}

TEST_F(OperationTensors, GoWhenTheCallersStreamWaits) {
  const Work work = queue_->push(operation());
  drop_tensors();
  work.wait();
  EXPECT_FALSE(output_.is_held());
  EXPECT_FALSE(input_.is_held());
  EXPECT_EQ(told(), Told{}) << "the stream's order is enough";
}

TEST_F(OperationTensors, AreLeftToTheAllocatorByAWorkThatNobodyWaitedFor) {
  Work work = queue_->push(operation());
  drop_tensors();
  work.wait_as_follower();
  close_queue();
  EXPECT_EQ(told(), Told{});
  work = {};
  EXPECT_EQ(told(), both_used_by_the_communicator());
  EXPECT_FALSE(output_.is_held());
  EXPECT_FALSE(input_.is_held());
}

TEST_F(OperationTensors, AreLeftToTheAllocatorIfTheWorkGoesBeforeTheLaunch) {
  queue_->push(operation());
  drop_tensors();
  close_queue();
  EXPECT_EQ(told(), both_used_by_the_communicator());
  EXPECT_FALSE(output_.is_held());
}

// The memory belongs to the caller's stream, which does not wait.
TEST_F(OperationTensors, AreKeptWhenOnlyAnotherStreamWaits) {
  Work work = queue_->push(operation());
  drop_tensors();
  {
    const c10::StreamGuard guard(kAnother);
    work.wait();
  }
  close_queue();
  EXPECT_TRUE(output_.is_held());
  work = {};
  EXPECT_EQ(told(), both_used_by_the_communicator());
}

TEST_F(OperationTensors, GoWithTheWorkThatComesAfter) {
  Piece next;
  Work first = queue_->push(operation());
  drop_tensors();
  OperationQueue other("other", launcher_, CommOptions{});
  Operation second = operation(first);
  second.output = second.input = next.tensor();
  const Work work = other.push(std::move(second));
  first = {};
  work.wait();
  EXPECT_FALSE(output_.is_held());
  EXPECT_FALSE(input_.is_held());
  EXPECT_EQ(told(), Told{});
}

TEST_F(OperationTensors, AreNotKeptByAllThatComesAfter) {
  Piece next;
  Work last = queue_->push(operation());
  drop_tensors();
  for (int i = 0; i < 3; ++i) {
    Operation following = operation(last);
    following.output = following.input = next.tensor();
    last = queue_->push(std::move(following));
  }
  last.wait_as_follower();
  close_queue();
  EXPECT_FALSE(output_.is_held());
  EXPECT_THAT(told(), IsSupersetOf(both_used_by_the_communicator()));
}

TEST_F(OperationTensors, IncludeWhatAReductionCounts) {
  Piece nonfinite;
  Piece squares;
  Operation reduction = operation();
  reduction.reduction.nonfinite = nonfinite.tensor();
  reduction.reduction.squares = squares.tensor();
  queue_->push(std::move(reduction));
  drop_tensors();
  close_queue();
  Told expected = both_used_by_the_communicator();
  expected.emplace_back(nonfinite.memory(), kCommunicators);
  expected.emplace_back(squares.memory(), kCommunicators);
  EXPECT_EQ(told(), expected);
}

TEST_F(OperationTensors, AreNoneOnTheHostWhereDoneMeansEnded) {
  at::Tensor tensor = at::ones({4});
  Operation on_host;
  on_host.output = on_host.input = tensor;
  const Work work = queue_->push(std::move(on_host));
  work.wait();
  EXPECT_EQ(tensor.use_count(), 1u);
}

}  // namespace
}  // namespace fsdp::tensors_in_use_test
