// Communicators over messages between processes: the backends `mpi` and `tcp`.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/comm/backends.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/message/message_transport.h"
#include "fsdp/comm/operation_queue.h"
#include "fsdp/comm/reduce/reduce_ranks.h"

namespace fsdp {

namespace {

// A reduction receives and sums no more than this from each rank at a time: what has come is still
// in cache when it is summed.
constexpr int64_t kPieceBytes = int64_t{1} << 20;

// Few ranks talk all to all at once. More exchange what is small in rounds, with partners whose
// number doubles: a rank talks to ten of a thousand.
constexpr int kMaxRanksAtOnce = 16;
constexpr int64_t kSmallBytes = int64_t{64} << 10;  // of one rank

bool goes_in_rounds(int ranks, int64_t bytes) {
  return ranks > kMaxRanksAtOnce && bytes <= kSmallBytes;
}

class MessageCommunicator final : public Communicator, private OperationRunner {
 public:
  MessageCommunicator(std::shared_ptr<MessageTransport> transport, const CommOptions& options,
                      int channel, std::vector<int> members, std::string name, int sum_group)
      : Communicator(position_of(transport->rank(), members), static_cast<int>(members.size()),
                     std::move(name), sum_group),
        transport_(std::move(transport)),
        options_(options),
        channel_(channel),
        members_(std::move(members)),
        queue_(this->name(), *this, options) {}

  void abort(const std::string& message) override {
    transport_->tell_everybody(message, MessageTransport::Words::kFinal);
  }
  void throw_if_aborted() override {
    transport_->listen();
    transport_->throw_if_aborted();
  }
  Work enqueue(Operation operation) override { return queue_.push(std::move(operation)); }

 private:
  std::unique_ptr<Communicator> split_off(Subgroup part) override;
  static int position_of(int world_rank, const std::vector<int>& members) {
    return static_cast<int>(std::find(members.begin(), members.end(), world_rank) -
                            members.begin());
  }

  std::optional<c10::Event> run(const std::shared_ptr<Operation>& operation) override;
  bool is_alone() const override { return size() == 1; }
  void idle() override { transport_->listen(); }
  double idle_seconds() const override { return 0.05; }
  void cancel() noexcept override {
    transport_->tell_everybody(
        concat("rank ", rank(), " of '", name(), "' was left by an exception"),
        MessageTransport::Words::kInPassing);
  }

  void keep_what_is_in_flight(const std::shared_ptr<Operation>& operation);
  c10::Event run_staged(Operation& operation);
  void run_on_host(Operation& operation);
  void compare_fingerprints(const Operation& operation);
  // Collects equally many bytes of every rank in staging_, in rank order.
  void gather_to_staging(const void* own, int64_t bytes);
  void reduce_for_all(const Operation& operation);
  void all_gather(const at::Tensor& output, const Shares& shares, const char* own);
  void reduce_share(const Operation& operation, const at::Tensor& output);
  void all_to_all(const Operation& operation);
  void broadcast(const Operation& operation);

  // One message to and one from every other member, or every other one of `num_ranks` that are
  // `stride` apart from `first` on; those of 0 bytes are not sent.
  template <typename Send, typename Receive>
  void exchange_with_all(Send send_to, Receive receive_from) {
    exchange_with({.first = 0, .stride = 1, .num_ranks = size()}, send_to, receive_from);
  }
  struct Some {
    int first;
    int stride;
    int num_ranks;
  };
  template <typename Send, typename Receive>
  void exchange_with(const Some& ranks, Send send_to, Receive receive_from);
  void exchange_one(int to, Message send, int from, Message receive);
  void exchange(std::span<const Message> sends, std::span<const Message> receives);

  const std::shared_ptr<MessageTransport> transport_;
  const CommOptions options_;
  const int channel_;
  const std::vector<int> members_;  // world rank of each rank here

  // Used by run() alone.
  const Operation* current_ = nullptr;  // for messages
  std::vector<char> staging_;           // what other ranks send that goes to no tensor
  std::shared_ptr<Operation> on_host_;  // a device operation's copy in pinned memory
  DeviceSide device_side_;              // device tensors: copies to and from pinned memory

  OperationQueue queue_;  // last: its worker uses everything above
};

std::unique_ptr<Communicator> MessageCommunicator::split_off(Subgroup part) {
  for (int& member : part.members) member = members_[static_cast<size_t>(member)];
  // Ranks may have split different groups before; the largest proposal is free on all of them.
  at::Tensor channel = at::full({1}, transport_->propose_channel(), at::kLong);
  all_reduce(channel, {.op = ReduceOp::kMax}, "split " + part.name).wait();
  const auto agreed = static_cast<int>(channel.item<int64_t>());
  transport_->agree_on_channel(agreed);
  return std::make_unique<MessageCommunicator>(
      transport_, options_, agreed, std::move(part.members), std::move(part.name), part.sum_group);
}

std::optional<c10::Event> MessageCommunicator::run(const std::shared_ptr<Operation>& operation) {
  transport_->throw_if_aborted();
  if (operation->print.kind == OpKind::kCopy) return run_copy(*operation, device_side_);
  current_ = operation.get();
  try {
    if (options_.checked) {
      compare_fingerprints(*operation);
      operation->moves_since = std::chrono::steady_clock::now();
    }
    if (!operation->device().is_cpu()) return run_staged(*operation);
    run_on_host(*operation);
    return std::nullopt;
  } catch (const AbortedError&) {
    // The failure is another rank's, or was told to all by this one: nothing to add to its words.
    keep_what_is_in_flight(operation);
    throw;
  } catch (const std::exception& error) {
    keep_what_is_in_flight(operation);
    abort(concat("rank ", rank(), " of '", name(), "' failed: ", error.what()));
    throw;
  }
}

// The transport may still write to the memory of an exchange that was cancelled.
void MessageCommunicator::keep_what_is_in_flight(const std::shared_ptr<Operation>& operation) {
  transport_->keep_forever(operation);
  transport_->keep_forever(std::move(on_host_));
  transport_->keep_forever(std::make_shared<std::vector<char>>(std::move(staging_)));
}

c10::Event MessageCommunicator::run_staged(Operation& operation) {
  const c10::Device device = operation.device();
  const c10::Stream stream = device_side_.stream_on(device);
  operation.on_device->runs_on = stream;
  const c10::StreamGuard guard(stream);
  const auto pinned_like = [](const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
  };
  on_host_ = std::make_shared<Operation>();
  on_host_->print = operation.print;
  on_host_->reduction = operation.reduction;
  on_host_->input_shares = operation.input_shares;
  on_host_->output_shares = operation.output_shares;
  on_host_->input = pinned_like(operation.input);
  const bool one_tensor = operation.output.is_same(operation.input);
  on_host_->output = one_tensor ? on_host_->input : pinned_like(operation.output);

  const at::Tensor& flag = operation.reduction.nonfinite;
  if (flag.defined()) on_host_->reduction.nonfinite = at::zeros({1}, at::kFloat);
  const at::Tensor& squares = operation.reduction.squares;
  if (squares.defined()) on_host_->reduction.squares = at::zeros({1}, at::kDouble);

  follow_on_device(operation, device_side_);
  operation.on_device->ready.block(stream);
  on_host_->input.copy_(operation.input, /*non_blocking=*/true);
  if (operation.reduction.store == Store::kAdd)
    on_host_->output.copy_(operation.output, /*non_blocking=*/true);
  c10::Event copied(device.type());
  copied.record(stream);
  copied.synchronize();  // the worker thread's host wait; transports read host memory
  run_on_host(*on_host_);
  operation.output.copy_(on_host_->output, /*non_blocking=*/true);
  if (flag.defined() && on_host_->reduction.nonfinite.item<float>() != 0) flag.fill_(1);
  if (squares.defined()) squares.add_(on_host_->reduction.squares.item<double>());
  c10::Event finished(device.type());
  finished.record(stream);
  on_host_.reset();  // the pinned memory's allocator waits for the copy before it reuses it
  return finished;
}

void MessageCommunicator::run_on_host(Operation& operation) {
  switch (operation.print.kind) {
    case OpKind::kAllGather:
      return all_gather(operation.output, operation.output_shares, at_element(operation.input, 0));
    case OpKind::kReduceScatter:
      return reduce_share(operation, operation.output);
    case OpKind::kAllReduce:
      return reduce_for_all(operation);
    case OpKind::kAllToAll:
      return all_to_all(operation);
    case OpKind::kBroadcast:
      return broadcast(operation);
    case OpKind::kBarrier:
      return gather_to_staging("", 1);
    case OpKind::kCopy:
      return;
  }
}

template <typename Send, typename Receive>
void MessageCommunicator::exchange_with(const Some& ranks, Send send_to, Receive receive_from) {
  std::vector<Message> sends;
  std::vector<Message> receives;
  const int own = (rank() - ranks.first) / ranks.stride;
  for (int step = 1; step < ranks.num_ranks; ++step) {
    // Each rank begins with its right neighbour, so that nobody is everybody's first target.
    const int to = ranks.first + (own + step) % ranks.num_ranks * ranks.stride;
    const int from = ranks.first + (own + ranks.num_ranks - step) % ranks.num_ranks * ranks.stride;
    sends.push_back(send_to(to));
    receives.push_back(receive_from(from));
    sends.back().peer = members_[static_cast<size_t>(to)];
    receives.back().peer = members_[static_cast<size_t>(from)];
  }
  exchange(sends, receives);
}

void MessageCommunicator::exchange(std::span<const Message> sends,
                                   std::span<const Message> receives) {
  Purpose purpose;
  purpose.what = concat("rank ", rank(), " of '", name(), "' at ", current_->print.text());
  purpose.timeout_seconds = options_.timeout_seconds;
  purpose.timeout_name = options_.timeout_name;
  transport_->exchange(channel_, sends, receives, purpose);
}

void MessageCommunicator::exchange_one(int to, Message send, int from, Message receive) {
  send.peer = members_[static_cast<size_t>(to)];
  receive.peer = members_[static_cast<size_t>(from)];
  exchange({&send, 1}, {&receive, 1});
}

void MessageCommunicator::gather_to_staging(const void* own, int64_t bytes) {
  staging_.resize(static_cast<size_t>(size() * bytes));
  const auto place_of = [&](int rank_here) {
    return Message{0, staging_.data() + rank_here * bytes, bytes};
  };
  if (!goes_in_rounds(size(), bytes)) {
    std::memcpy(place_of(rank()).data, own, static_cast<size_t>(bytes));
    return exchange_with_all([&](int) { return place_of(rank()); }, place_of);
  }
  // Place i holds the bytes of the i-th rank after this one until the end. A rank that has those of
  // `num` ranks, itself and those after it, gives them to the rank `num` before it, and gets those
  // of as many ranks from `num` after it.
  std::memcpy(staging_.data(), own, static_cast<size_t>(bytes));
  for (int num = 1; num < size(); num *= 2) {
    const int64_t moved = std::min(num, size() - num) * bytes;
    exchange_one((rank() + size() - num) % size(), {0, staging_.data(), moved},
                 (rank() + num) % size(), {0, place_of(num).data, moved});
  }
  std::rotate(staging_.begin(), staging_.end() - rank() * bytes, staging_.end());
}

void MessageCommunicator::compare_fingerprints(const Operation& operation) {
  gather_to_staging(&operation.print, sizeof(Fingerprint));
  for (int other = 0; other < size(); ++other) {
    Fingerprint theirs;
    std::memcpy(&theirs, staging_.data() + other * sizeof(theirs), sizeof(theirs));
    if (theirs == operation.print) continue;
    throw CommError(concat("ranks of '", name(), "' disagree: rank ", rank(), " is at ",
                           operation.print.text(), "; rank ", other, " is at ", theirs.text()));
  }
}

void MessageCommunicator::all_gather(const at::Tensor& output, const Shares& shares,
                                     const char* own) {
  const int64_t width = output.element_size();
  char* own_place = at_element(output, shares.offset(rank()));
  const int64_t own_bytes = shares.count(rank()) * width;
  if (shares.is_equal() && goes_in_rounds(size(), own_bytes)) {
    gather_to_staging(own, own_bytes);
    std::memcpy(at_element(output, 0), staging_.data(), staging_.size());
    return;
  }
  if (own_place != own && own_bytes > 0)
    std::memcpy(own_place, own, static_cast<size_t>(own_bytes));
  exchange_with_all(
      [&](int) {
        return Message{0, own_place, own_bytes};
      },
      [&](int from) {
        return Message{0, at_element(output, shares.offset(from)), shares.count(from) * width};
      });
}

// Every rank adds all of what is small.
void MessageCommunicator::reduce_for_all(const Operation& operation) {
  const Reduction& reduction = operation.reduction;
  const Shares& shares = operation.output_shares;
  const auto bytes = static_cast<int64_t>(operation.output.nbytes());
  const bool is_watched = reduction.nonfinite.defined() || reduction.squares.defined();
  if (is_watched || !goes_in_rounds(size(), bytes * size())) {
    const at::Tensor own =
        operation.output.view(-1).narrow(0, shares.offset(rank()), shares.count(rank()));
    reduce_share(operation, own);
    return all_gather(operation.output, shares, at_element(own, 0));
  }
  gather_to_staging(at_element(operation.input, 0), bytes);
  std::vector<const void*> inputs;
  for (int from = 0; from < size(); ++from) inputs.push_back(staging_.data() + from * bytes);
  reduce_ranks({.inputs = inputs,
                .output = at_element(operation.output, 0),
                .numel = operation.output.numel(),
                .types = {operation.print.wire, operation.print.result},
                .group = static_cast<size_t>(SumOrder::of(size(), sum_group()).group)},
               reduction);
}

// Piece by piece. For each group in turn, this rank's group adds its contributions to the rank
// there that is at this rank's place; they arrive in `staging_`, but for this rank's own. The sums
// then go to that rank, and those for this rank come. With one group the first sum is all.
void MessageCommunicator::reduce_share(const Operation& operation, const at::Tensor& output) {
  const Shares& shares = operation.input_shares;
  const ReduceTypes types{operation.print.wire, operation.print.result};
  const at::ScalarType wide = type_between_hops(operation.reduction, types.wire);
  const auto width = static_cast<int64_t>(c10::elementSize(types.wire));
  const auto wide_width = static_cast<int64_t>(c10::elementSize(wide));
  const SumOrder order = SumOrder::of(size(), sum_group());
  const ReductionHops hops = hops_of(operation.reduction, static_cast<size_t>(size()));
  const bool is_one_hop = order.num_groups() == 1;
  const int own_group = order.group_of(rank());
  const int place = order.place_of(rank());

  const int64_t piece_numel = std::min(
      kPieceBytes / width, ReductionPieces::of(order, shares.largest(), width, wide_width).numel);
  const int64_t of_sums = is_one_hop ? 0 : order.num_groups() * piece_numel * wide_width;
  staging_.resize(static_cast<size_t>(2 * of_sums + order.group * piece_numel * width));
  const auto sum_for = [&](int to) {
    return staging_.data() + order.group_of(to) * piece_numel * wide_width;
  };
  const auto sum_from = [&](int from) { return sum_for(from) + of_sums; };
  const auto contribution_of = [&](int from) {
    return staging_.data() + 2 * of_sums + order.place_of(from) * piece_numel * width;
  };
  for (int64_t begin = 0; begin < shares.largest(); begin += piece_numel) {
    const auto count = [&](int owner) {
      return std::clamp<int64_t>(shares.count(owner) - begin, 0, piece_numel);
    };
    const auto part_for = [&](int owner) {
      return at_element(operation.input,
                        shares.offset(owner) + std::min(begin, shares.count(owner)));
    };
    for (int to = 0; to < order.num_groups(); ++to) {
      const auto owner_at_place_of = [&](int member) {
        return order.rank_at(to, order.place_of(member));
      };
      const int owner = owner_at_place_of(rank());
      std::vector<const void*> inputs(static_cast<size_t>(order.group));
      inputs[static_cast<size_t>(place)] = part_for(owner);
      exchange_with(
          {.first = order.rank_at(own_group, 0), .stride = 1, .num_ranks = order.group},
          [&](int member) {
            const int its_owner = owner_at_place_of(member);
            return Message{0, part_for(its_owner), count(its_owner) * width};
          },
          [&](int member) {
            inputs[static_cast<size_t>(order.place_of(member))] = contribution_of(member);
            return Message{0, contribution_of(member), count(owner) * width};
          });
      if (count(owner) == 0) continue;
      reduce_ranks({.inputs = inputs,
                    .output = is_one_hop ? at_element(output, begin) : sum_for(owner),
                    .numel = count(owner),
                    .types = {types.wire, is_one_hop ? types.result : wide}},
                   is_one_hop ? operation.reduction : hops.within_group);
    }
    if (is_one_hop) continue;
    const int64_t mine = count(rank());
    std::vector<const void*> inputs(static_cast<size_t>(order.num_groups()));
    inputs[static_cast<size_t>(own_group)] = sum_for(rank());
    exchange_with(
        {.first = place, .stride = order.group, .num_ranks = order.num_groups()},
        [&](int to) {
          return Message{0, sum_for(to), count(to) * wide_width};
        },
        [&](int from) {
          inputs[static_cast<size_t>(order.group_of(from))] = sum_from(from);
          return Message{0, sum_from(from), mine * wide_width};
        });
    if (mine == 0) continue;
    reduce_ranks({.inputs = inputs,
                  .output = at_element(output, begin),
                  .numel = mine,
                  .types = {wide, types.result}},
                 hops.across_groups);
  }
}

void MessageCommunicator::all_to_all(const Operation& operation) {
  const int64_t width = operation.output.element_size();
  const Shares& out = operation.output_shares;
  const Shares& in = operation.input_shares;
  if (in.count(rank()) > 0)
    std::memcpy(at_element(operation.output, out.offset(rank())),
                at_element(operation.input, in.offset(rank())),
                static_cast<size_t>(in.count(rank()) * width));
  exchange_with_all(
      [&](int to) {
        return Message{0, at_element(operation.input, in.offset(to)), in.count(to) * width};
      },
      [&](int from) {
        return Message{0, at_element(operation.output, out.offset(from)), out.count(from) * width};
      });
}

// The root sends each rank one piece, then the ranks gather the pieces: nobody sends more than
// about one copy of the tensor, whatever the number of ranks. Something small goes from rank to
// rank: `num` ranks that have it, counted from the root, give it to the next `num`.
void MessageCommunicator::broadcast(const Operation& operation) {
  const int root = operation.print.root;
  const Shares& shares = operation.output_shares;
  const int64_t width = operation.output.element_size();
  const auto bytes = static_cast<int64_t>(operation.output.nbytes());
  if (goes_in_rounds(size(), bytes)) {
    const int own = (rank() + size() - root) % size();  // its place after the root
    const auto whole_with = [&](int place) {
      const int peer = members_[static_cast<size_t>((root + place) % size())];
      return Message{peer, at_element(operation.output, 0), bytes};
    };
    for (int num = 1; num < size(); num *= 2) {
      if (own < num && own + num < size()) exchange(std::array{whole_with(own + num)}, {});
      if (own >= num && own < 2 * num) exchange({}, std::array{whole_with(own - num)});
    }
    return;
  }
  std::vector<Message> sends;
  std::vector<Message> receives;
  const auto piece = [&](int owner, int peer) {
    return Message{members_[static_cast<size_t>(peer)],
                   at_element(operation.output, shares.offset(owner)), shares.count(owner) * width};
  };
  if (rank() == root) {
    for (int to = 0; to < size(); ++to)
      if (to != root) sends.push_back(piece(to, to));
  } else {
    receives.push_back(piece(rank(), root));
  }
  exchange(sends, receives);
  all_gather(operation.output, shares, at_element(operation.output, shares.offset(rank())));
}

}  // namespace

std::unique_ptr<Communicator> communicator_over(std::shared_ptr<MessageTransport> transport,
                                                const CommOptions& options) {
  options.validate();
  std::vector<int> members(static_cast<size_t>(transport->size()));
  std::iota(members.begin(), members.end(), 0);
  // One host, until the ranks know better (joined_world).
  const int group = chosen_group(options.sum_group, std::vector<int>(members.size()));
  return std::make_unique<MessageCommunicator>(std::move(transport), options,
                                               MessageTransport::kWorldChannel, std::move(members),
                                               "world", group);
}

std::unique_ptr<Communicator> connect_mpi(const Launch& launch, const CommOptions& options) {
  options.validate();
  if (!mpi_available())
    throw Error(
        concat(name_of(launch.launcher), " started ", launch.size,
               " processes, but this build has no MPI: install libopenmpi-dev and openmpi-bin "
               "and build again with FSDP_MPI=ON"));
  std::shared_ptr<MessageTransport> transport = mpi_transport();
  FSDP_CHECK(transport->size() == launch.size && transport->rank() == launch.rank,
             name_of(launch.launcher), " says rank ", launch.rank, " of ", launch.size,
             ", but MPI says rank ", transport->rank(), " of ", transport->size(),
             ": start the job with mpirun, or with srun --mpi=pmix if Slurm has it");
  return communicator_over(std::move(transport), options);
}

}  // namespace fsdp
