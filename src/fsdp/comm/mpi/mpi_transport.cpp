// The `mpi` backend's messages: one process's membership in an MPI job.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/comm/message/message_transport.h"

namespace fsdp {

namespace {

constexpr int64_t kMaxMessageBytes = int64_t{1} << 30;  // MPI counts in int

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommError(concat(call, " failed: ", std::string(text, static_cast<size_t>(length))));
}

// The requests of one exchange, in pieces that MPI can count.
class Pending {
 public:
  void receive(int channel, const Message& message) {
    for_each_piece(message, [&](char* data, int bytes) {
      check_mpi(MPI_Irecv(data, bytes, MPI_BYTE, message.peer, channel, MPI_COMM_WORLD,
                          &add(message.peer, bytes)),
                "MPI_Irecv");
    });
  }

  void send(int channel, const Message& message) {
    for_each_piece(message, [&](char* data, int bytes) {
      check_mpi(MPI_Isend(data, bytes, MPI_BYTE, message.peer, channel, MPI_COMM_WORLD,
                          &add(message.peer, kIsSend)),
                "MPI_Isend");
    });
  }

  // Returns whether everything has arrived.
  bool test(const Purpose& purpose) {
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int done = 0;
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &done,
                                  indices_.data(), statuses_.data());
    if (done == MPI_UNDEFINED) return true;
    for (int i = 0; i < done; ++i) {
      const auto index = static_cast<size_t>(indices_[static_cast<size_t>(i)]);
      const MPI_Status& status = statuses_[static_cast<size_t>(i)];
      if (code == MPI_ERR_IN_STATUS) check_status(status, index, purpose);
      check_size(status, index, purpose);
      ++num_done_;
    }
    if (code != MPI_ERR_IN_STATUS) check_mpi(code, "MPI_Testsome");
    return num_done_ == requests_.size();
  }

  // The ranks whose messages are missing; if none, those who have not taken ours.
  std::vector<std::string> missing() const {
    std::vector<std::string> senders = peers_of(/*receives=*/true);
    return senders.empty() ? peers_of(/*receives=*/false) : senders;
  }

 private:
  static constexpr int kIsSend = -1;
  struct Expectation {
    int peer;
    int bytes;  // kIsSend for sends
  };

  template <typename Body>
  void for_each_piece(const Message& message, Body body) {
    for (int64_t at = 0; at < message.bytes; at += kMaxMessageBytes)
      body(message.data + at, static_cast<int>(std::min(kMaxMessageBytes, message.bytes - at)));
  }

  MPI_Request& add(int peer, int bytes) {
    expectations_.push_back({peer, bytes});
    return requests_.emplace_back(MPI_REQUEST_NULL);
  }

  void check_status(const MPI_Status& status, size_t index, const Purpose& purpose) const {
    if (status.MPI_ERROR == MPI_SUCCESS) return;
    throw CommError(
        concat(purpose.what, ": the message of rank ", expectations_[index].peer,
               " is longer than expected or was lost: the ranks disagree about what they "
               "do; run again with FSDP_CHECKED=1 to see both sides"));
  }

  void check_size(const MPI_Status& status, size_t index, const Purpose& purpose) const {
    const Expectation& expected = expectations_[index];
    if (expected.bytes == kIsSend) return;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    if (bytes == expected.bytes) return;
    throw size_error(purpose, expected.peer, bytes, expected.bytes);
  }

  std::vector<std::string> peers_of(bool receives) const {
    std::vector<std::string> peers;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      if ((expectations_[i].bytes != kIsSend) == receives)
        peers.push_back(std::to_string(expectations_[i].peer));
    }
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  }

  std::vector<MPI_Request> requests_;
  std::vector<Expectation> expectations_;  // one per request
  std::vector<int> indices_;               // for test()
  std::vector<MPI_Status> statuses_;       // for test()
  size_t num_done_ = 0;
};

// Everything is point-to-point on one MPI communicator, told apart by channel numbers (MPI tags).
// MPI's own collectives and communicators are not used: theirs wait without deadline, do not say
// who is missing, sum in an order of their choice, and cannot be named in messages.
class MpiTransport final : public MessageTransport {
 public:
  MpiTransport();
  // Ends MPI, unless something failed: an orderly end would wait for ranks that may never come.
  ~MpiTransport();

  void exchange(int channel, std::span<const Message> sends, std::span<const Message> receives,
                const Purpose& purpose) override;
  void listen() override;
  void tell_everybody(const std::string& message, Words words) override;
  void keep_forever(std::shared_ptr<void> object) override;

 private:
  struct Listener {
    std::vector<char> text = std::vector<char>(kMaxTextBytes);
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void post_listener();

  std::mutex mutex_;  // protects the members below
  bool failed_ = false;
  std::unique_ptr<Listener> listener_;
  std::deque<std::string> outgoing_;  // messages about failures, kept until the end
  std::vector<std::shared_ptr<void>> kept_forever_;
};

MpiTransport::MpiTransport() : MessageTransport(0, 1) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  int provided = MPI_THREAD_SINGLE;
  if (initialized) {
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
  } else {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  }
  FSDP_CHECK(
      provided == MPI_THREAD_MULTIPLE, "this MPI library has thread level ", provided,
      ": fsdp needs MPI_THREAD_MULTIPLE, since gathers and reductions run beside each other");
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  listener_ = std::make_unique<Listener>();
  post_listener();
}

MpiTransport::~MpiTransport() {
  if (failed_ || abort_.raised()) {
    // MPI may still write to these; the process is about to end.
    for (auto& object : kept_forever_) new std::shared_ptr<void>(std::move(object));
    static_cast<void>(listener_.release());
    return;
  }
  MPI_Cancel(&listener_->request);
  MPI_Wait(&listener_->request, MPI_STATUS_IGNORE);
  MPI_Finalize();
}

void MpiTransport::post_listener() {
  check_mpi(MPI_Irecv(listener_->text.data(), static_cast<int>(kMaxTextBytes), MPI_BYTE,
                      MPI_ANY_SOURCE, kFailureChannel, MPI_COMM_WORLD, &listener_->request),
            "MPI_Irecv");
}

void MpiTransport::listen() {
  const std::lock_guard lock(mutex_);
  int arrived = 0;
  MPI_Status status;
  check_mpi(MPI_Test(&listener_->request, &arrived, &status), "MPI_Test");
  if (!arrived) return;
  int length = 0;
  MPI_Get_count(&status, MPI_BYTE, &length);
  raise_heard({listener_->text.data(), static_cast<size_t>(length)});
  post_listener();
}

void MpiTransport::tell_everybody(const std::string& message, Words words) {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  const std::string& text = outgoing_.emplace_back(raise_own(message, words));
  if (text.empty()) return;
  std::vector<MPI_Request> requests;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_BYTE, peer, kFailureChannel,
              MPI_COMM_WORLD, &requests.emplace_back(MPI_REQUEST_NULL));
  }
  // Short messages leave at once, but some transports move only while MPI is called. A dead peer
  // must not hold us up.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  Backoff backoff;
  for (int all = 0; !all && std::chrono::steady_clock::now() < deadline; backoff.pause())
    MPI_Testall(static_cast<int>(requests.size()), requests.data(), &all, MPI_STATUSES_IGNORE);
}

void MpiTransport::exchange(int channel, std::span<const Message> sends,
                            std::span<const Message> receives, const Purpose& purpose) {
  Pending pending;
  for (const Message& message : receives) pending.receive(channel, message);
  for (const Message& message : sends) pending.send(channel, message);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(purpose.timeout_seconds);
  Backoff backoff;
  for (int round = 0; !pending.test(purpose); ++round) {
    backoff.pause();
    if (round % 64 != 63) continue;
    listen();
    throw_if_aborted();
    if (std::chrono::steady_clock::now() < deadline) continue;
    throw late_error(purpose, pending.missing());
  }
}

void MpiTransport::keep_forever(std::shared_ptr<void> object) {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  kept_forever_.push_back(std::move(object));
}

}  // namespace

bool mpi_available() { return true; }

std::shared_ptr<MessageTransport> mpi_transport() {
  static std::mutex mutex;
  static std::weak_ptr<MpiTransport> current;
  const std::lock_guard lock(mutex);
  if (auto runtime = current.lock()) return runtime;
  int finalized = 0;
  MPI_Finalized(&finalized);
  FSDP_CHECK(!finalized,
             "this process has left its MPI job already: keep the first World alive as "
             "long as any is needed");
  auto runtime = std::make_shared<MpiTransport>();
  current = runtime;
  return runtime;
}

}  // namespace fsdp
