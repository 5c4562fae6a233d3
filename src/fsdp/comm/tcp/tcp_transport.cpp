#include "fsdp/comm/tcp/tcp_transport.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// The cost of a message that waits in memory, besides its bytes.
constexpr int64_t kMessageCost = 128;
// Most channels of one peer: a program that makes more communicators than this has a defect.
constexpr size_t kMaxLanes = size_t{1} << 16;

// How long the leader looks again and again before it sleeps: about what waking up costs.
constexpr std::chrono::microseconds kSpin{50};

// How long it sleeps at most, so that nothing depends on a wakeup alone.
constexpr double kNapSeconds = 0.1;

bool is_short(int64_t bytes) { return bytes <= TcpTransport::kEagerBytes; }

}  // namespace

struct TcpTransport::Receive {
  Exchange* exchange = nullptr;
  int peer = 0;
  int channel = 0;
  char* data = nullptr;
  int64_t bytes = 0;
  int64_t arrived_bytes = 0;
  bool is_done() const { return arrived_bytes == bytes; }
};

struct TcpTransport::Send {
  Exchange* exchange = nullptr;
  int peer = 0;
  OutgoingMessage message;
};

struct TcpTransport::Exchange {
  const Purpose& purpose;
  std::deque<Receive> receives = {};  // deques: others point to the elements
  std::deque<Send> sends = {};
  std::exception_ptr error = nullptr;

  bool is_done() const {
    return std::all_of(receives.begin(), receives.end(),
                       [](const Receive& receive) { return receive.is_done(); }) &&
           std::all_of(sends.begin(), sends.end(),
                       [](const Send& send) { return send.message.is_sent(); });
  }

  // The ranks whose messages are missing; if none, those who have not taken ours.
  std::vector<std::string> missing() const {
    std::vector<std::string> ranks;
    for (const Receive& receive : receives)
      if (!receive.is_done()) ranks.push_back(std::to_string(receive.peer));
    if (!ranks.empty()) return ranks;
    for (const Send& send : sends)
      if (!send.message.is_sent()) ranks.push_back(std::to_string(send.peer));
    return ranks;
  }

  void fail_with_size(int peer, int64_t bytes, int64_t expected_bytes) {
    if (!error) error = std::make_exception_ptr(size_error(purpose, peer, bytes, expected_bytes));
  }
};

TcpTransport::TcpTransport(int rank, TcpMesh mesh)
    : MessageTransport(rank, static_cast<int>(mesh.sockets.size())),
      peers_(mesh.sockets.size()),
      calls_(std::move(mesh.calls)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  for (int other = 0; other < size(); ++other) {
    if (other == rank) continue;
    peer(other).connection = std::make_unique<TcpConnection>(other);
    Socket& socket = mesh.sockets[static_cast<size_t>(other)];
    if (socket) peer(other).connection->open(std::move(socket));
  }
}

TcpTransport::~TcpTransport() {
  Lock lock(mutex_);
  if (failed_ || abort_.raised()) return;
  for (Peer& other : peers_)
    if (other.connection && other.connection->is_open())
      other.connection->enqueue_frame({FrameKind::kGoodbye, 0, 0, 0});
  flush(lock);
  for (Peer& other : peers_)
    if (other.connection) other.connection->end_writing();
}

void TcpTransport::exchange(int channel, std::span<const Message> sends,
                            std::span<const Message> receives, const Purpose& purpose) {
  Exchange exchange{purpose};
  Lock lock(mutex_);
  for (const Message& message : receives)
    if (message.bytes > 0)
      post(exchange.receives.emplace_back(
          Receive{&exchange, message.peer, channel, message.data, message.bytes}));
  for (const Message& message : sends)
    if (message.bytes > 0)
      post(exchange.sends.emplace_back(
          Send{&exchange, message.peer, {channel, message.data, message.bytes}}));
  wait(exchange, lock);
  if (exchange.is_done() && !exchange.error) return;
  cancel(exchange);
  lock.unlock();
  if (exchange.error) std::rethrow_exception(exchange.error);
  throw_if_aborted();
  throw late_error(purpose, exchange.missing());
}

void TcpTransport::fail_with_size(Receive& receive, int64_t bytes) {
  receive.exchange->fail_with_size(receive.peer, bytes, receive.bytes);
  others_completed_ = true;
}

// Two ranks that have something to say to each other are both here: one of them calls.
void TcpTransport::call(int rank_there, Exchange& exchange) {
  if (!calls_ || rank_there > rank() || peer(rank_there).connection->has_begun()) return;
  try {
    calls_->call(rank_there);
    if (has_leader_) wake_leader();
  } catch (const std::exception&) {
    if (!exchange.error) exchange.error = std::current_exception();
  }
}

void TcpTransport::post(Receive& receive) {
  call(receive.peer, *receive.exchange);
  Lane& lane = peer(receive.peer).lanes[receive.channel];
  lane.receive = &receive;
  TcpConnection& connection = *peer(receive.peer).connection;
  if (!lane.early.empty()) {
    const auto bytes = static_cast<int64_t>(lane.early.front().data.size());
    if (bytes != receive.bytes) return fail_with_size(receive, bytes);
    if (lane.early.front().is_complete) complete(receive);
    return;
  }
  if (lane.announced_bytes && *lane.announced_bytes != receive.bytes)
    return fail_with_size(receive, *lane.announced_bytes);
  if (!is_short(receive.bytes) || lane.announced_bytes) {
    connection.enqueue_frame({FrameKind::kReady, receive.channel, receive.bytes, 0});
    write_now(connection);
  }
}

void TcpTransport::post(Send& send) {
  call(send.peer, *send.exchange);
  Peer& other = peer(send.peer);
  Lane& lane = other.lanes[send.message.channel];
  TcpConnection& connection = *other.connection;
  const int64_t cost = is_short(send.message.bytes) ? send.message.bytes + kMessageCost : 0;
  const bool fits_window = cost > 0 && cost <= other.window_left;
  other.window_left -= cost;
  if (fits_window) {
    connection.enqueue_message(send.message);
  } else {
    connection.enqueue_frame({FrameKind::kAnnounce, send.message.channel, send.message.bytes, 0});
    lane.send = &send;
    send_large(lane, connection);
  }
  write_now(connection);
}

// Without a connection nothing is written yet: whoever waits for messages makes it.
void TcpTransport::write_now(TcpConnection& connection) const {
  connection.write();
  if (has_leader_ && connection.wants_to_write()) wake_leader();
}

// Sends a large message if both sides have named its size.
void TcpTransport::send_large(Lane& lane, TcpConnection& connection) {
  if (lane.send == nullptr || !lane.ready_bytes) return;
  Send& send = *std::exchange(lane.send, nullptr);
  const int64_t expected = *std::exchange(lane.ready_bytes, std::nullopt);
  if (expected != send.message.bytes) {
    send.exchange->fail_with_size(rank(), send.message.bytes, expected);
    others_completed_ = true;
    return;
  }
  connection.enqueue_message(send.message);
}

// An early message is there as a whole: it goes to its place.
void TcpTransport::complete(Receive& receive) {
  Lane& lane = peer(receive.peer).lanes[receive.channel];
  std::memcpy(receive.data, lane.early.front().data.data(), static_cast<size_t>(receive.bytes));
  lane.early.pop_front();
  peer(receive.peer).early_bytes -= receive.bytes + kMessageCost;
  lane.receive = nullptr;
  others_completed_ = true;
  receive.arrived_bytes = receive.bytes;
  note_taken(receive);
}

// Tells the sender that a short message has been taken, in portions, so that it costs a frame for
// many messages.
void TcpTransport::note_taken(Receive& receive) {
  if (!is_short(receive.bytes)) return;
  Peer& other = peer(receive.peer);
  other.taken_bytes += receive.bytes + kMessageCost;
  if (other.taken_bytes < kWindowBytes / 2) return;
  other.connection->enqueue_frame(
      {FrameKind::kTaken, kFailureChannel, std::exchange(other.taken_bytes, 0), 0});
  write_now(*other.connection);
}

void TcpTransport::cancel(Exchange& exchange) noexcept {
  for (Receive& receive : exchange.receives) {
    Lane& lane = peer(receive.peer).lanes[receive.channel];
    if (lane.receive == &receive) lane.receive = nullptr;
    peer(receive.peer).connection->stop_reading_into(receive.data, receive.bytes);
  }
  for (Send& send : exchange.sends) {
    Lane& lane = peer(send.peer).lanes[send.message.channel];
    if (lane.send == &send) lane.send = nullptr;
    peer(send.peer).connection->cancel(send.message);
  }
  failed_ = true;
}

// A peer that said goodbye sends nothing more and takes nothing any more.
void TcpTransport::check_peers(Exchange& exchange) {
  const auto check = [&](int rank_there, bool is_done) {
    const Peer& other = peer(rank_there);
    if (is_done || exchange.error || !other.has_left) return;
    exchange.error = std::make_exception_ptr(
        CommError(concat(exchange.purpose.what, " needs world rank ", rank_there,
                         ", which has left the job: the ranks disagree about what they do; run "
                         "again with FSDP_CHECKED=1 to see both sides")));
  };
  for (const Receive& receive : exchange.receives) check(receive.peer, receive.is_done());
  for (const Send& send : exchange.sends) check(send.peer, send.message.is_sent());
}

void TcpTransport::wait(Exchange& exchange, Lock& lock) {
  const auto deadline =
      Clock::now() + std::chrono::duration<double>(exchange.purpose.timeout_seconds);
  const auto is_over = [&] {
    check_peers(exchange);
    return exchange.is_done() || exchange.error || abort_.raised() || Clock::now() >= deadline;
  };
  while (!is_over()) {
    if (has_leader_) {
      changed_.wait_for(lock, std::chrono::duration<double>(kNapSeconds));
      continue;
    }
    has_leader_ = true;
    while (!is_over()) {
      const std::chrono::duration<double> left = deadline - Clock::now();
      progress(lock, std::min(kNapSeconds, left.count()));
      if (std::exchange(others_completed_, false)) changed_.notify_all();
    }
    has_leader_ = false;
    changed_.notify_all();  // somebody else leads
  }
}

void TcpTransport::wake_leader() const {
  const uint64_t one = 1;
  static_cast<void>(!::write(wake_.fd(), &one, sizeof(one)));
}

void TcpTransport::progress(Lock& lock, double wait_seconds) {
  std::vector<pollfd> waiting;
  std::vector<size_t> ranks;
  waiting.push_back({wake_.fd(), POLLIN, 0});
  for (size_t other = 0; other < peers_.size(); ++other) {
    const TcpConnection* connection = peers_[other].connection.get();
    if (connection == nullptr || !connection->is_open()) continue;
    const int events = connection->wants_to_write() ? POLLIN | POLLOUT : POLLIN;
    waiting.push_back({connection->fd(), static_cast<short>(events), 0});
    ranks.push_back(other);
  }
  const size_t first_call = waiting.size();
  if (calls_) calls_->add_to(waiting);
  lock.unlock();
  int num_ready = 0;
  const auto spin_until = Clock::now() + (wait_seconds > 0 ? kSpin : kSpin * 0);
  do {
    num_ready = ::poll(waiting.data(), waiting.size(), 0);
    if (num_ready == 0 && wait_seconds > 0) std::this_thread::yield();
  } while (num_ready == 0 && Clock::now() < spin_until);
  if (num_ready == 0 && wait_seconds > 0)
    num_ready = ::poll(waiting.data(), waiting.size(), static_cast<int>(wait_seconds * 1000) + 1);
  lock.lock();
  if (num_ready <= 0) return;
  if (waiting[0].revents != 0) {
    uint64_t count = 0;
    static_cast<void>(!::read(wake_.fd(), &count, sizeof(count)));
  }
  for (size_t i = 0; i < ranks.size(); ++i)
    if (waiting[i + 1].revents != 0) serve(ranks[i], waiting[i + 1].revents);
  if (std::any_of(waiting.begin() + static_cast<ptrdiff_t>(first_call), waiting.end(),
                  [](const pollfd& call) { return call.revents != 0; }))
    advance_calls();
  // After all words were heard: a rank that ends may have ended because of another's failure.
  for (const size_t rank : ranks)
    if (!peers_[rank].connection->is_open()) note_end(peers_[rank]);
}

void TcpTransport::serve(size_t rank, short events) {
  Peer& other = peers_[rank];
  TcpConnection& connection = *other.connection;
  if ((events & ~POLLOUT) != 0) connection.read(*this);
  if (connection.write()) others_completed_ = true;
}

void TcpTransport::advance_calls() {
  try {
    calls_->advance([this](const Introduction& other, Socket socket) {
      if (other.size != size() || peer(other.rank).connection->has_begun()) return;
      TcpConnection& connection = *peer(other.rank).connection;
      connection.open(std::move(socket));
      if (connection.write()) others_completed_ = true;
    });
  } catch (const std::exception& error) {
    fail_job(error.what());
  }
}

void TcpTransport::note_end(Peer& ended) {
  others_completed_ = true;
  if (ended.has_left || abort_.raised()) return;
  fail_job(concat("rank ", ended.connection->peer(), " is gone: its connection ",
                  ended.connection->ending(), "; look at what it said last"));
}

// Tells the others why this rank ends: they may see its connection close before that of the rank
// that left.
void TcpTransport::fail_job(const std::string& message) {
  failed_ = others_completed_ = true;
  const std::string text = raise_own(message, Words::kFinal);
  if (!text.empty()) send_failure(text);
}

void TcpTransport::listen() {
  Lock lock(mutex_);
  if (has_leader_) return;
  has_leader_ = true;
  progress(lock, 0);
  has_leader_ = false;
  changed_.notify_all();
}

int TcpTransport::num_connections() {
  const Lock lock(mutex_);
  return static_cast<int>(std::count_if(peers_.begin(), peers_.end(), [](const Peer& other) {
    return other.connection && other.connection->is_open();
  }));
}

void TcpTransport::send_failure(const std::string& text) {
  for (Peer& other : peers_) {
    if (!other.connection || !other.connection->is_open()) continue;
    other.connection->enqueue_frame({FrameKind::kFailure, kFailureChannel, 0, 0}, text);
    other.connection->write();
  }
}

void TcpTransport::flush(Lock& lock) {
  const auto deadline = Clock::now() + std::chrono::seconds(2);
  const auto is_flushed = [this] {
    return std::none_of(peers_.begin(), peers_.end(), [](const Peer& other) {
      return other.connection && !other.connection->is_flushed();
    });
  };
  for (Peer& other : peers_)
    if (other.connection) other.connection->write();
  while (!is_flushed() && Clock::now() < deadline) {
    if (has_leader_) {
      wake_leader();
      changed_.wait_for(lock, std::chrono::milliseconds(5));
      continue;
    }
    has_leader_ = true;
    progress(lock, 0.002);
    has_leader_ = false;
    changed_.notify_all();
  }
}

void TcpTransport::tell_everybody(const std::string& message, Words words) {
  Lock lock(mutex_);
  failed_ = true;
  const std::string text = raise_own(message, words);
  if (text.empty()) return;
  send_failure(text);
  wake_leader();
  changed_.notify_all();
  flush(lock);
}

std::optional<char*> TcpTransport::begin_frame(int rank, const FrameHeader& header) {
  if (header.kind == FrameKind::kFailure) {
    if (header.frame_bytes > kMaxTextBytes) return std::nullopt;
    failure_text_.assign(static_cast<size_t>(header.frame_bytes), ' ');
    return failure_text_.data();
  }
  Peer& other = peer(rank);
  if (other.lanes.size() >= kMaxLanes && !other.lanes.contains(header.channel)) return std::nullopt;
  if (header.kind != FrameKind::kData || abort_.raised()) return nullptr;
  return begin_data(other, header);
}

std::optional<char*> TcpTransport::begin_data(Peer& other, const FrameHeader& header) {
  Lane& lane = other.lanes[header.channel];
  Receive* receive = lane.receive;
  if (receive == nullptr) return begin_early(other, lane, header);
  if (header.message_bytes != receive->bytes) {
    fail_with_size(*receive, header.message_bytes);
    return nullptr;
  }
  if (header.frame_bytes > receive->bytes - receive->arrived_bytes) return std::nullopt;
  return receive->data + receive->arrived_bytes;
}

std::optional<char*> TcpTransport::begin_early(Peer& other, Lane& lane, const FrameHeader& header) {
  // Larger messages come only when they are asked for, so the exchange that asked was cancelled.
  if (!is_short(header.message_bytes)) return nullptr;
  other.early_bytes += header.message_bytes + kMessageCost;
  if (other.early_bytes > kWindowBytes) return std::nullopt;
  lane.early.push_back({std::vector<char>(static_cast<size_t>(header.message_bytes))});
  return lane.early.back().data.data();
}

void TcpTransport::end_frame(int rank, const FrameHeader& header) {
  Peer& other = peer(rank);
  Lane& lane = other.lanes[header.channel];
  switch (header.kind) {
    case FrameKind::kData:
      return end_data(lane, header);
    case FrameKind::kAnnounce:
      return hear_announcement(other, header);
    case FrameKind::kReady:
      lane.ready_bytes = header.message_bytes;
      return send_large(lane, *other.connection);
    case FrameKind::kFailure:
      return hear_failure();
    case FrameKind::kGoodbye:
      other.has_left = others_completed_ = true;
      return;
    case FrameKind::kTaken:
      other.window_left += std::min(header.message_bytes, kWindowBytes - other.window_left);
      return;
  }
}

void TcpTransport::hear_failure() {
  failed_ = others_completed_ = true;
  const bool was_explained = abort_.explained();
  raise_heard(failure_text_);
  // This rank ends now. The others may see that before they hear of the rank that failed.
  if (!was_explained && abort_.explained()) send_failure(failure_text_);
}

void TcpTransport::hear_announcement(Peer& other, const FrameHeader& header) {
  Lane& lane = other.lanes[header.channel];
  lane.announced_bytes = header.message_bytes;
  if (lane.receive == nullptr) return;
  if (lane.receive->bytes != header.message_bytes)
    return fail_with_size(*lane.receive, header.message_bytes);
  // For a short message post() has told the sender nothing, so this rank says now that it waits.
  if (is_short(header.message_bytes))
    other.connection->enqueue_frame({FrameKind::kReady, header.channel, header.message_bytes, 0});
}

void TcpTransport::end_data(Lane& lane, const FrameHeader& header) {
  if (abort_.raised()) return;  // the payload may have gone nowhere
  if (!lane.early.empty() && !lane.early.back().is_complete) {
    lane.early.back().is_complete = true;
    if (lane.receive != nullptr && !lane.receive->exchange->error) complete(*lane.receive);
    return;
  }
  if (lane.receive == nullptr || lane.receive->bytes != header.message_bytes) return;
  lane.receive->arrived_bytes += header.frame_bytes;
  if (!lane.receive->is_done()) return;
  others_completed_ = true;
  note_taken(*lane.receive);
  lane.receive = nullptr;
  lane.announced_bytes.reset();
}

}  // namespace fsdp
