// Messages between processes that are connected by TCP.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/message/message_transport.h"
#include "fsdp/comm/tcp/tcp_connection.h"
#include "fsdp/comm/tcp/tcp_mesh.h"

namespace fsdp {

// The transport has no thread of its own. One of the threads that wait in exchanges reads and
// writes for all of them while the others sleep, and a communicator without work looks in now and
// then.
//
// Messages up to kEagerBytes leave at once; one that comes before it is asked for waits in memory.
// Larger ones leave when the receiver has a place for them, so they never need any; so do short
// ones once the receiver has kWindowBytes of them that it has not asked for. Both sides name the
// size, so that both notice when they disagree.
//
// In a large job two ranks are connected by their first message: the one with the higher number
// calls.
//
// A message that fits neither the buffer that waits for it, nor the window, nor the channels that
// there may be ends the connection: no peer makes this process take more memory.
class TcpTransport final : public MessageTransport, private FrameReader {
 public:
  static constexpr int64_t kEagerBytes = int64_t{64} << 10;
  // Short messages from one peer that wait in memory, counted with what each costs besides.
  static constexpr int64_t kWindowBytes = int64_t{8} << 20;

  TcpTransport(int rank, TcpMesh mesh);
  // Says goodbye, unless something failed: a connection that closes without one is a failure to the
  // others.
  ~TcpTransport() override;

  void exchange(int channel, std::span<const Message> sends, std::span<const Message> receives,
                const Purpose& purpose) override;
  void listen() override;
  int num_connections();
  void tell_everybody(const std::string& message, Words words) override;
  // An exchange that fails takes its buffers back: nothing to keep.
  void keep_forever(std::shared_ptr<void>) override {}

 private:
  struct Exchange;
  struct Receive;
  struct Send;
  struct EarlyMessage {
    std::vector<char> data;
    bool is_complete = false;
  };
  // The traffic between this rank and one peer on one channel. At most one message each way is in
  // transfer at a time; short ones may have come early.
  struct Lane {
    Receive* receive = nullptr;              // what this rank waits for
    std::deque<EarlyMessage> early;          // what came before this rank asked for it
    std::optional<int64_t> announced_bytes;  // the peer has a large message
    Send* send = nullptr;                    // a large message, until the peer is ready for it
    std::optional<int64_t> ready_bytes;      // the peer is ready for a large message
  };
  struct Peer {
    std::unique_ptr<TcpConnection> connection;  // nullptr at this rank's own place
    std::map<int, Lane> lanes;                  // by channel
    bool has_left = false;
    int64_t window_left = kWindowBytes;  // what may be sent before it is asked for
    int64_t early_bytes = 0;             // what the peer has sent before it was asked for
    int64_t taken_bytes = 0;             // what it has not been told of yet
  };

  using Lock = std::unique_lock<std::mutex>;

  // All below: the caller holds mutex_.
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  void call(int rank_there, Exchange& exchange);
  void post(Receive& receive);
  void post(Send& send);
  void write_now(TcpConnection& connection) const;
  void fail_with_size(Receive& receive, int64_t bytes);
  void complete(Receive& receive);
  void note_taken(Receive& receive);
  void send_large(Lane& lane, TcpConnection& connection);
  void cancel(Exchange& exchange) noexcept;
  void wait(Exchange& exchange, Lock& lock);
  void check_peers(Exchange& exchange);

  // Reads and writes whatever the sockets allow, waiting for them up to `wait_seconds` without the
  // lock. The caller is the leader.
  void progress(Lock& lock, double wait_seconds);
  void serve(size_t rank, short events);
  void advance_calls();
  void wake_leader() const;
  void note_end(Peer& ended);
  void fail_job(const std::string& message);
  void send_failure(const std::string& text);
  // Until all frames are written, or two seconds have passed: a dead peer must not hold us up.
  void flush(Lock& lock);

  std::optional<char*> begin_frame(int rank, const FrameHeader& header) override;
  std::optional<char*> begin_data(Peer& other, const FrameHeader& header);
  std::optional<char*> begin_early(Peer& other, Lane& lane, const FrameHeader& header);
  void end_frame(int rank, const FrameHeader& header) override;
  void end_data(Lane& lane, const FrameHeader& header);
  void hear_failure();
  void hear_announcement(Peer& other, const FrameHeader& header);

  std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  bool has_leader_ = false;
  bool others_completed_ = false;  // an exchange of somebody who sleeps
  bool failed_ = false;
  std::vector<Peer> peers_;
  std::unique_ptr<RankCalls> calls_;  // nullptr where all are connected
  std::string failure_text_;          // of the failure frame that is being read
  Socket wake_;                       // an event that ends the leader's waiting
};

}  // namespace fsdp
