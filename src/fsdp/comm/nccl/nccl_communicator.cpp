// The `nccl` backend. Operations are launched by the caller's thread, on a stream of their own, and
// nobody waits: order, data and end are the device's business, so that a step can be recorded into
// a graph.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/backends.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/nccl/device_watch.h"
#include "fsdp/comm/nccl/nccl_operations.h"
#include "fsdp/comm/operation.h"

namespace fsdp {

namespace {

class NcclCommunicator final : public Communicator, private NcclCalls {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> hosts, c10::Device device,
                   const CommOptions& options, const SubgroupOptions& own)
      : Communicator(hosts->rank(), hosts->size(), hosts->name(), hosts->sum_group()),
        device_(device),
        options_(options),
        messages_(own.messages),
        stream_(stream_for(own)),
        exceptions_in_flight_(std::uncaught_exceptions()),
        hosts_(std::move(hosts)) {
    // Now, while all ranks are here. Later their first operations may come in different orders on
    // different communicators, and each would wait for the other.
    if (size() > 1) connect();
  }

  // Ends what is under way within its deadline or, on the way out of an exception, at once.
  ~NcclCommunicator() override {
    if (!watch_) return;
    cancel_if_left_by_an_exception();
    watch_->wait();
    if (replay_watch_) replay_watch_->wait();
  }

  void abort(const std::string& message) override {
    hosts_->abort(message);
    fail(message);
  }

  void throw_if_aborted() override;

  std::string why_not_recorded() const override { return ""; }

  NcclCalls* nccl() override { return this; }

  Work enqueue(Operation operation) override;

 private:
  std::unique_ptr<Communicator> split_off(Subgroup part) override {
    return std::make_unique<NcclCommunicator>(hosts_->split(part.colors, std::move(part.name)),
                                              device_, options_, part.options);
  }
  c10::cuda::CUDAStream stream_for(const SubgroupOptions& own) const;
  void watch_replay(const c10::Stream& stream) override;
  RegisteredMemory register_memory(void* address, int64_t bytes, UserBuffers best) override;
  void deregister_memory(void* address) noexcept override;
  UsedBuffers used_buffers() const override;

  void connect();
  // Tells the other ranks, too.
  void cancel_everywhere(const std::string& words);
  void fail(const std::string& message) noexcept;
  enum class Whose : uint8_t { kOwn, kAnothers };
  void note_failure(const std::string& message, Whose whose);
  void throw_if_failed();
  void cancel_if_left_by_an_exception() noexcept;
  bool is_agreed(bool by_this_rank);
  DeviceWatch::Callbacks callbacks_for_watching();

  const c10::Device device_;
  const CommOptions options_;
  const Messages messages_;
  const c10::cuda::CUDAStream stream_;
  const int exceptions_in_flight_;  // when constructed
  const std::unique_ptr<Communicator> hosts_;
  uint64_t num_operations_ = 0;
  WorkPool works_;
  std::optional<NcclOperations> operations_;
  std::optional<StreamMarks> marks_;
  std::map<c10::StreamId, StreamMarks> replay_marks_;

  std::mutex failure_mutex_;             // protects the members below
  std::atomic<bool> has_failed_{false};  // may be read without
  std::string failure_;                  // the first error's words
  Whose failed_by_ = Whose::kOwn;

  // Last: their threads use everything above. Replays run on streams of their own.
  std::optional<DeviceWatch> watch_;
  std::optional<DeviceWatch> replay_watch_;
};

c10::cuda::CUDAStream NcclCommunicator::stream_for(const SubgroupOptions& own) const {
  const auto new_stream = [&] {
    return c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index());
  };
  if (own.stream == nullptr || size() == 1) return new_stream();
  if (!own.stream->has_value()) own.stream->emplace(new_stream());
  return c10::cuda::CUDAStream(**own.stream);
}

void NcclCommunicator::connect() {
  const at::Tensor bytes = at::zeros({NCCL_UNIQUE_ID_BYTES}, at::kByte);
  if (rank() == 0) {
    const ncclUniqueId id = NcclHandle::new_id();
    std::memcpy(bytes.mutable_data_ptr(), id.internal, NCCL_UNIQUE_ID_BYTES);
  }
  hosts_->broadcast(bytes, 0, "nccl id").wait();
  ncclUniqueId id;
  std::memcpy(id.internal, bytes.const_data_ptr(), NCCL_UNIQUE_ID_BYTES);
  operations_.emplace(id, *hosts_, device_, options_, messages_, stream_);
  marks_.emplace();
  watch_.emplace(options_.timeout_seconds, callbacks_for_watching());
  log(LogLevel::kDebug, "'", name(), "' uses NCCL ", nccl_version(), " on ", device_.str());
}

DeviceWatch::Callbacks NcclCommunicator::callbacks_for_watching() {
  return {.trouble = [this]() -> std::string {
            try {
              hosts_->throw_if_aborted();
            } catch (const AbortedError& error) {
              note_failure(concat(error.what(), watch_->under_way()), Whose::kAnothers);
              return error.what();
            }
            const std::string words = operations_->handle().error();
            return words.empty() ? "" : concat("NCCL reports: ", words);
          },
          .on_fail = [this](const std::string& words) { cancel_everywhere(words); }};
}

void NcclCommunicator::cancel_everywhere(const std::string& words) {
  const std::string message = concat("rank ", rank(), " of '", name(), "': ", words);
  note_failure(message, Whose::kOwn);
  hosts_->abort(message);
  operations_->handle().abort();
}

void NcclCommunicator::watch_replay(const c10::Stream& stream) {
  if (!operations_) return;  // nothing was recorded
  if (!replay_watch_) replay_watch_.emplace(options_.timeout_seconds, callbacks_for_watching());
  replay_watch_->add("a replayed step",
                     replay_marks_[stream.id()].next(c10::cuda::CUDAStream(stream)));
}

// Ends the operations that are under way on the device, so that threads that wait for the device
// return; the next call throws the message.
void NcclCommunicator::fail(const std::string& message) noexcept {
  note_failure(message, Whose::kOwn);
  if (operations_) operations_->handle().abort();
}

void NcclCommunicator::note_failure(const std::string& message, Whose whose) {
  const std::lock_guard lock(failure_mutex_);
  if (has_failed_) return;
  failure_ = message;
  failed_by_ = whose;
  has_failed_ = true;
}

void NcclCommunicator::throw_if_failed() {
  if (!has_failed_) return;
  const std::lock_guard lock(failure_mutex_);
  if (failed_by_ == Whose::kAnothers) throw AbortedError(failure_);
  throw CommError(failure_);
}

void NcclCommunicator::throw_if_aborted() {
  throw_if_failed();
  try {
    hosts_->throw_if_aborted();
  } catch (const AbortedError& error) {
    throw AbortedError(error.what() + (watch_ ? watch_->under_way() : ""));
  }
}

// The operations under way will never be complete, so no other rank may go on waiting for them.
void NcclCommunicator::cancel_if_left_by_an_exception() noexcept {
  if (std::uncaught_exceptions() > exceptions_in_flight_)
    fail(concat("rank ", rank(), " of '", name(), "' was left by an exception"));
}

bool NcclCommunicator::is_agreed(bool by_this_rank) {
  const at::Tensor agreed = at::full({1}, by_this_rank ? 1 : 0, at::kLong);
  hosts_->all_reduce(agreed, {.op = ReduceOp::kMin}, "user buffers").wait();
  return agreed.item<int64_t>() == 1;
}

// Ranks that mix what is registered with what is not get wrong results, so it is all or none. They
// meet before each attempt, which NCCL has no deadline for.
RegisteredMemory NcclCommunicator::register_memory(void* address, int64_t bytes, UserBuffers best) {
  if (!operations_) connect();
  const c10::cuda::CUDAGuard guard(device_);
  c10::cuda::device_synchronize();
  if (is_agreed(operations_->has_staging()) && !is_agreed(operations_->register_staging()))
    operations_->deregister_staging();
  NcclBuffers& buffers = operations_->buffers();
  std::string why_not_better;
  for (const UserBuffers use : {UserBuffers::kSymmetric, UserBuffers::kRegistered}) {
    if (use > best) continue;
    std::string obstacle = NcclBuffers::obstacle_to(use);
    if (is_agreed(obstacle.empty())) {
      obstacle = buffers.add(address, bytes, use);
      if (is_agreed(obstacle.empty())) return {use, why_not_better};
      buffers.release(address);
    }
    if (!why_not_better.empty()) why_not_better += "; ";
    why_not_better += obstacle.empty() ? "other ranks cannot" : obstacle;
  }
  return {UserBuffers::kOff, why_not_better};
}

void NcclCommunicator::deregister_memory(void* address) noexcept {
  if (!operations_) return;
  cancel_if_left_by_an_exception();
  const c10::cuda::CUDAGuard guard(device_);
  cudaDeviceSynchronize();
  operations_->buffers().release(address);
}

UsedBuffers NcclCommunicator::used_buffers() const {
  return operations_ ? operations_->buffers().in_use() : UsedBuffers();
}

// The watch asks the hosts for failures of other ranks, so that this does not have to.
Work NcclCommunicator::enqueue(Operation operation) {
  const c10::Device device = operation.device();
  if (!device.is_cuda()) return hosts_->enqueue(std::move(operation));
  throw_if_failed();
  FSDP_CHECK(device == device_, "'", name(), "' is on ", device_.str(), ", but a tensor of '",
             operation.print.tag.text(), "' is on ", device.str(),
             ": a process computes on the GPU of its local rank, or on the only one that it sees");
  if (!operations_) connect();
  operation.print.sequence = num_operations_++;
  operation.after.wait_as_follower();
  const c10::cuda::CUDAStream stream = operations_->stream();
  const c10::cuda::CUDAStreamGuard guard(stream);
  operation.on_device->ready.block(stream);
  if (const c10::Event* ended = operation.after.event()) ended->block(stream);
  try {
    operations_->run(operation);
  } catch (const CommError& error) {
    throw_if_failed();  // the failure that caused this error, if there is one
    cancel_everywhere(error.what() + watch_->under_way());
    throw_if_failed();
  }
  const Fingerprint print = operation.print;
  operation.on_device->runs_on = stream;
  std::shared_ptr<WorkState> state = works_.take();
  state->keep_tensors_of(std::make_shared<Operation>(std::move(operation)));
  state->complete_on(stream);
  Work work(std::move(state));
  const bool is_recorded =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  if (!is_recorded) watch_->add(print, marks_->next(stream));
  return work;
}

}  // namespace

void* nccl_allocate(int64_t bytes) {
  void* address = nullptr;
  const ncclResult_t result = ncclMemAlloc(&address, static_cast<size_t>(bytes));
  if (result == ncclSuccess) return address;
  throw Error(concat("NCCL cannot allocate ", bytes_text(static_cast<double>(bytes)), ": ",
                     ncclGetErrorString(result), " (", ncclGetLastError(nullptr), ")"));
}

void nccl_deallocate(void* address) noexcept { static_cast<void>(ncclMemFree(address)); }

bool nccl_available() { return true; }

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "";
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::string nccl_gpu_id(int device_index) {
  std::array<char, 32> id{};
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), device_index));
  return id.data();
}

std::unique_ptr<Communicator> over_nccl(std::unique_ptr<Communicator> hosts, int local_rank,
                                        const CommOptions& options) {
  const int num_devices = c10::cuda::device_count();
  FSDP_CHECK(num_devices > 0, "NCCL was asked for and this host has no GPU: set FSDP_NCCL to auto");
  const c10::Device device(at::kCUDA,
                           static_cast<c10::DeviceIndex>(gpu_of_rank(local_rank, num_devices)));
  // All connections when a communicator is made, rather than when each algorithm is first used: a
  // launch then waits for no other rank. Read by NCCL once; what the user has set stays.
  setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  return std::make_unique<NcclCommunicator>(std::move(hosts), device, options,
                                            SubgroupOptions{.messages = Messages::kToNobody});
}

}  // namespace fsdp
