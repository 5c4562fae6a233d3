// The `nccl` backend. Operations are launched by the caller's thread, on a stream of their own, and
// nobody waits: order, data and end are the device's business, so that a step can be recorded into
// a graph.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/connect_nccl.h"
#include "fsdp/comm/device_watch.h"
#include "fsdp/comm/nccl_handle.h"
#include "fsdp/comm/reduce_on_device.h"
#include "fsdp/comm/reduce_ranks.h"

namespace fsdp {

namespace {

// What travels at once of a reduction: the ranks' contributions lie side by side until they are
// added, and this bounds the memory for them.
constexpr int64_t kStagingBytes = int64_t{64} << 20;
// An all-reduce of no more than this is sent whole to everybody: one message instead of two.
constexpr int64_t kSmallBytes = int64_t{64} << 10;

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> hosts, c10::Device device,
                   const CommOptions& options)
      : Communicator(hosts->rank(), hosts->size(), hosts->name()),
        device_(device),
        options_(options),
        hosts_(std::move(hosts)) {
    // Now, when all ranks are here: their first operations may come in different orders on
    // different communicators.
    if (size() > 1) connect();
  }

  std::unique_ptr<Communicator> split(std::span<const int> colors, std::string name) override {
    return std::make_unique<NcclCommunicator>(hosts_->split(colors, std::move(name)), device_,
                                              options_);
  }

  void abort(const std::string& message) override {
    hosts_->abort(message);
    fail(message);
  }

  void throw_if_aborted() override {
    hosts_->throw_if_aborted();
    const std::lock_guard lock(failure_mutex_);
    if (!failure_.empty()) throw CommError(failure_);
  }

  std::string why_not_recorded() const override { return ""; }

  Work enqueue(Operation operation) override;

 private:
  struct OnDevice {
    OnDevice(c10::Device device, const ncclUniqueId& id, const Communicator& ranks,
             const CommOptions& options)
        : stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())),
          handle(id, ranks.rank(), ranks.size(), ranks.name(), options) {}

    const c10::cuda::CUDAStream stream;
    NcclHandle handle;
    // Bytes; the last one is the largest. Smaller ones stay: a recorded step goes on using its own.
    std::vector<at::Tensor> staging;
    at::Tensor workspace;  // of sums
  };

  void connect();
  void fail(const std::string& message) noexcept;

  void run(const Operation& operation);
  void all_gather(const at::Tensor& output, const at::Tensor& input, const Shares& shares);
  void exchange(const at::Tensor& output, const Shares& output_shares, const at::Tensor& input,
                const Shares& input_shares);
  void reduce_share(const Operation& operation, const at::Tensor& output);
  void reduce_natively(const Operation& operation, const at::Tensor& output);
  void reduce_whole(const Operation& operation);
  at::Tensor staging_for(at::ScalarType type, int64_t numel);

  const c10::Device device_;
  const CommOptions options_;
  const std::unique_ptr<Communicator> hosts_;
  std::string doing_;  // what is launched, for errors
  uint64_t num_operations_ = 0;
  std::optional<OnDevice> on_device_;

  std::mutex failure_mutex_;  // protects the member below
  std::string failure_;       // the first error's words

  std::optional<DeviceWatch> watch_;  // last: its thread uses everything above
};

void NcclCommunicator::connect() {
  const c10::cuda::CUDAGuard guard(device_);
  const at::Tensor bytes = at::zeros({NCCL_UNIQUE_ID_BYTES}, at::kByte);
  if (rank() == 0) {
    const ncclUniqueId id = NcclHandle::new_id();
    std::memcpy(bytes.mutable_data_ptr(), id.internal, NCCL_UNIQUE_ID_BYTES);
  }
  hosts_->broadcast(bytes, 0, "nccl id").wait();
  ncclUniqueId id;
  std::memcpy(id.internal, bytes.const_data_ptr(), NCCL_UNIQUE_ID_BYTES);
  on_device_.emplace(device_, id, *this, options_);
  watch_.emplace(
      options_.timeout_seconds,
      DeviceWatch::Callbacks{.trouble =
                                 [this] {
                                   hosts_->throw_if_aborted();
                                   const std::string words = on_device_->handle.error();
                                   return words.empty() ? "" : concat("NCCL reports: ", words);
                                 },
                             .on_fail =
                                 [this](const std::string& words) {
                                   const std::string message =
                                       concat("rank ", rank(), " of '", name(), "': ", words);
                                   hosts_->abort(message);
                                   fail(message);
                                 }});
  log(LogLevel::kDebug, "'", name(), "' uses NCCL ", nccl_version(), " on ", device_.str());
}

// What is under way on the device ends, so that whoever waits for the device comes back; the next
// call says why.
void NcclCommunicator::fail(const std::string& message) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    if (failure_.empty()) failure_ = message;
  }
  if (on_device_) on_device_->handle.abort();
}

Work NcclCommunicator::enqueue(Operation operation) {
  const c10::Device device = operation.device();
  if (!device.is_cuda()) return hosts_->enqueue(std::move(operation));
  throw_if_aborted();
  FSDP_CHECK(device == device_, "'", name(), "' is on ", device_.str(), ", but a tensor of '",
             operation.print.tag.text(), "' is on ", device.str(),
             ": the GPU of a process is the one of its local rank");
  const c10::cuda::CUDAGuard device_guard(device);
  if (!on_device_) connect();
  operation.print.sequence = num_operations_++;
  operation.after.wait_as_follower();
  const c10::cuda::CUDAStream stream = on_device_->stream;
  const c10::cuda::CUDAStreamGuard guard(stream);
  operation.ready->block(stream);
  if (const c10::Event* ended = operation.after.event()) ended->block(stream);
  doing_ = operation.print.text();
  run(operation);
  // Whoever waits and whoever watches have an event each: a Work's goes with it.
  c10::Event finished(at::kCUDA);
  finished.record(stream);
  const bool is_recorded =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  if (!is_recorded) {
    auto watched = std::make_shared<c10::Event>(at::kCUDA);
    watched->record(stream);
    watch_->add(std::make_shared<Operation>(std::move(operation)), std::move(watched));
  }
  auto state = std::make_shared<WorkState>();
  state->finish(std::move(finished));
  return Work(std::move(state));
}

bool is_sum(const Reduction& reduction) {
  return reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAvg;
}

at::Tensor share_of(const at::Tensor& tensor, const Shares& shares, int rank) {
  return tensor.view(-1).narrow(0, shares.offset(rank), shares.count(rank));
}

at::Tensor NcclCommunicator::staging_for(at::ScalarType type, int64_t numel) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(type));
  std::vector<at::Tensor>& staging = on_device_->staging;
  if (staging.empty() || staging.back().numel() < bytes)
    staging.push_back(at::empty({bytes}, at::device(device_).dtype(at::kByte)));
  return staging.back().narrow(0, 0, bytes).view(type);
}

void NcclCommunicator::all_gather(const at::Tensor& output, const at::Tensor& input,
                                  const Shares& shares) {
  const ncclDataType_t type = nccl_type(output.scalar_type());
  on_device_->handle.launch(doing_, [&](ncclComm_t comm) {
    if (shares.is_equal())
      return check_nccl(
          ncclAllGather(input.const_data_ptr(), output.mutable_data_ptr(),
                        static_cast<size_t>(input.numel()), type, comm, on_device_->stream),
          doing_);
    for (int root = 0; root < size(); ++root) {
      const at::Tensor place = share_of(output, shares, root);
      const void* from = root == rank() ? input.const_data_ptr() : place.const_data_ptr();
      check_nccl(ncclBroadcast(from, place.mutable_data_ptr(), static_cast<size_t>(place.numel()),
                               type, root, comm, on_device_->stream),
                 doing_);
    }
  });
}

void NcclCommunicator::exchange(const at::Tensor& output, const Shares& output_shares,
                                const at::Tensor& input, const Shares& input_shares) {
  const ncclDataType_t type = nccl_type(output.scalar_type());
  on_device_->handle.launch(doing_, [&](ncclComm_t comm) {
    for (int peer = 0; peer < size(); ++peer) {
      const at::Tensor sent = share_of(input, input_shares, peer);
      const at::Tensor received = share_of(output, output_shares, peer);
      check_nccl(ncclSend(sent.const_data_ptr(), static_cast<size_t>(sent.numel()), type, peer,
                          comm, on_device_->stream),
                 doing_);
      check_nccl(ncclRecv(received.mutable_data_ptr(), static_cast<size_t>(received.numel()), type,
                          peer, comm, on_device_->stream),
                 doing_);
    }
  });
}

// Every rank's contribution to this rank's share comes as it is and is added here, in rank order
// and in the accumulation type: the same bits as every other backend computes. In pieces of the
// largest share, so that all ranks take part in every piece.
void NcclCommunicator::reduce_share(const Operation& operation, const at::Tensor& output) {
  const Shares& shares = operation.input_shares;
  const at::ScalarType wire = operation.print.wire;
  if (options_.nccl_reduce == NcclReduce::kNative && shares.is_equal() &&
      at::isFloatingType(wire) && is_sum(operation.reduction))
    return reduce_natively(operation, output);
  const int64_t width = static_cast<int64_t>(c10::elementSize(wire));
  // Pieces begin at multiples of 128 elements, so that kernels can load 16 bytes at once.
  const int64_t fitting = std::max<int64_t>(kStagingBytes / width / size() / 128 * 128, 128);
  const int64_t piece = std::min(fitting, shares.largest());
  for (int64_t begin = 0; begin < shares.largest(); begin += piece) {
    const auto part_of = [&](int of) {
      return std::clamp<int64_t>(shares.count(of) - begin, 0, piece);
    };
    const int64_t mine = part_of(rank());
    const at::Tensor staged = staging_for(wire, mine * size());
    on_device_->handle.launch(doing_, [&](ncclComm_t comm) {
      for (int peer = 0; peer < size(); ++peer) {
        const at::Tensor sent = operation.input.view(-1).narrow(
            0, shares.offset(peer) + std::min(begin, shares.count(peer)), part_of(peer));
        check_nccl(ncclSend(sent.const_data_ptr(), static_cast<size_t>(sent.numel()),
                            nccl_type(wire), peer, comm, on_device_->stream),
                   doing_);
        check_nccl(
            ncclRecv(staged.narrow(0, peer * mine, mine).mutable_data_ptr(),
                     static_cast<size_t>(mine), nccl_type(wire), peer, comm, on_device_->stream),
            doing_);
      }
    });
    if (mine == 0) continue;
    std::vector<at::Tensor> inputs;
    for (int peer = 0; peer < size(); ++peer) inputs.push_back(staged.narrow(0, peer * mine, mine));
    reduce_on_device(inputs, operation.reduction, output.view(-1).narrow(0, begin, mine),
                     on_device_->workspace);
  }
}

// NCCL adds; the rest (scale, accumulation, squares, NaNs) is one more pass over this rank's share.
void NcclCommunicator::reduce_natively(const Operation& operation, const at::Tensor& output) {
  const at::ScalarType wire = operation.print.wire;
  const at::Tensor staged = staging_for(wire, output.numel());
  on_device_->handle.launch(doing_, [&](ncclComm_t comm) {
    check_nccl(ncclReduceScatter(operation.input.const_data_ptr(), staged.mutable_data_ptr(),
                                 static_cast<size_t>(output.numel()), nccl_type(wire), ncclSum,
                                 comm, on_device_->stream),
               doing_);
  });
  Reduction rest = operation.reduction;
  rest.op = ReduceOp::kSum;
  rest.scale = scale_of(operation.reduction, static_cast<size_t>(size()));
  reduce_on_device(std::span(&staged, 1), rest, output, on_device_->workspace);
}

void NcclCommunicator::reduce_whole(const Operation& operation) {
  const int64_t numel = operation.output.numel();
  const at::Tensor staged = staging_for(operation.print.wire, numel * size());
  all_gather(staged, operation.input, Shares::equal(numel, size()));
  std::vector<at::Tensor> inputs;
  for (int peer = 0; peer < size(); ++peer) inputs.push_back(staged.narrow(0, peer * numel, numel));
  reduce_on_device(inputs, operation.reduction, operation.output, on_device_->workspace);
}

void NcclCommunicator::run(const Operation& operation) {
  switch (operation.print.kind) {
    case OpKind::kAllGather:
      return all_gather(operation.output, operation.input, operation.output_shares);
    case OpKind::kReduceScatter:
      return reduce_share(operation, operation.output);
    case OpKind::kAllReduce: {
      // Squares and NaNs are counted by the rank that stores a share, so only a whole that nobody
      // counts may be computed by everybody.
      const bool counts =
          operation.reduction.squares.defined() || operation.reduction.nonfinite.defined();
      if (!counts && static_cast<int64_t>(operation.output.nbytes()) <= kSmallBytes)
        return reduce_whole(operation);
      const at::Tensor own = share_of(operation.output, operation.output_shares, rank());
      reduce_share(operation, own);
      return all_gather(operation.output, own, operation.output_shares);
    }
    case OpKind::kAllToAll:
      return exchange(operation.output, operation.output_shares, operation.input,
                      operation.input_shares);
    case OpKind::kBroadcast:
      return on_device_->handle.launch(doing_, [&](ncclComm_t comm) {
        check_nccl(
            ncclBroadcast(operation.input.const_data_ptr(), operation.output.mutable_data_ptr(),
                          static_cast<size_t>(operation.output.numel()),
                          nccl_type(operation.print.wire), operation.print.root, comm,
                          on_device_->stream),
            doing_);
      });
    case OpKind::kBarrier:
      return;  // has no tensor, so it is the hosts'
  }
}

}  // namespace

bool nccl_available() { return true; }

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "";
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::unique_ptr<Communicator> over_nccl(std::unique_ptr<Communicator> hosts, int local_rank,
                                        const CommOptions& options) {
  const int num_devices = c10::cuda::device_count();
  FSDP_CHECK(num_devices > 0, "NCCL was asked for and this host has no GPU: set FSDP_NCCL to auto");
  const c10::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank % num_devices));
  return std::make_unique<NcclCommunicator>(std::move(hosts), device, options);
}

}  // namespace fsdp
