// Sockets of TCP, and one connection to one rank: whole frames out of and into a stream of bytes,
// never waiting.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp {

using Deadline = std::chrono::steady_clock::time_point;

// Owns a file descriptor; empty when default-constructed or moved from.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

// A host's name or address, and a port there.
struct Endpoint {
  std::string host;
  int port = 0;

  std::string text() const;  // "10.0.0.1:29500", "[::1]:29500"
};

// Connects, or returns an empty socket when nobody answers there before the deadline or the host
// says no. An Error when the name has no address.
Socket try_connect(const Endpoint& endpoint, Deadline deadline);

// Begins to connect to an address in numbers; the socket becomes readable when that has failed or
// the other side says something. An empty socket when it cannot even begin; errno says why.
Socket start_connecting(const Endpoint& endpoint);

// Listens at an address of this host and that port, 0 for any free one. An Error when the address
// is not of this host or the port is taken.
Socket listen_at(const Endpoint& endpoint);

// An empty socket when nobody has called yet.
Socket try_accept(const Socket& listener);

// The place where a socket listens, or its own end of a connection, in numbers.
Endpoint endpoint_of(const Socket& socket);

// The address of this host, in numbers, at which others reach it who know `host`: the address that
// this name has if it is of this host, otherwise the one that packets to it leave from.
std::string own_address(const std::string& host);

// Whether an address in numbers is seen on its own host only.
bool is_loopback(const std::string& address);

// Sends small messages at once, and notices in about a minute when the other host is gone.
void prepare_for_messages(const Socket& socket);

// Sends or receives exactly that many bytes; false when the connection ends or the deadline passes.
bool send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline);
bool receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline);

enum class FrameKind : uint32_t {
  kData = 1,      // a piece of a message
  kAnnounce = 2,  // a large message of that many bytes waits for the receiver
  kReady = 3,     // a large message of that many bytes may come
  kFailure = 4,   // why the job fails; the payload is text
  kGoodbye = 5,   // nothing will follow
  kTaken = 6,     // short messages that cost that many bytes of the window have been taken
};

// The header of every payload, in the byte order of the hosts, which is the same on all.
struct FrameHeader {
  FrameKind kind = FrameKind::kData;
  int32_t channel = 0;
  int64_t message_bytes = 0;  // of the whole message
  int64_t frame_bytes = 0;    // of the payload that follows
};

// A message on its way out. Its owner keeps it, and the bytes it points to, until it is sent or
// cancelled.
struct OutgoingMessage {
  int channel = 0;
  const char* data = nullptr;
  int64_t bytes = 0;
  int64_t sent_bytes = 0;
  bool is_sent() const { return sent_bytes == bytes; }
};

// Who makes sense of the frames that a connection reads.
class FrameReader {
 public:
  virtual ~FrameReader() = default;
  // Where the payload goes; nullptr: nowhere. Nothing at all when the peer may not send this frame
  // now: the connection is closed.
  virtual std::optional<char*> begin_frame(int peer, const FrameHeader& header) = 0;
  virtual void end_frame(int peer, const FrameHeader& header) = 0;
};

// One connection to one rank.
class TcpConnection {
 public:
  // A large message travels in pieces of this size, so that messages of other channels, and words
  // about failures, get in between.
  static constexpr int64_t kMaxFrameBytes = int64_t{256} << 10;

  // Not connected yet: what is enqueued waits for the socket.
  explicit TcpConnection(int peer) : peer_(peer) {}

  void open(Socket socket);
  int peer() const { return peer_; }
  // Whether there is, or was, a socket.
  bool has_begun() const { return !buffer_.empty(); }
  int fd() const { return socket_.fd(); }
  bool is_open() const { return static_cast<bool>(socket_); }
  // Why it is no longer open: "was closed", "failed: Connection reset by peer".
  const std::string& ending() const { return ending_; }

  // --- out ---

  // Goes before messages that wait.
  void enqueue_frame(FrameHeader header, std::string_view payload = {});
  void enqueue_message(OutgoingMessage& message);
  // Sends no more of a message. A piece that has begun will be completed from a copy.
  void cancel(const OutgoingMessage& message) noexcept;
  bool wants_to_write() const;
  // Writes as much as the socket takes; true when a message was completed.
  bool write();
  // Whether all has been written and has reached the other host.
  bool is_flushed() const;

  // --- in ---

  // Reads what has arrived, up to some limit, so that no connection keeps the others waiting.
  void read(FrameReader& reader);
  // A payload that is being read into this memory goes nowhere from now on.
  void stop_reading_into(const char* data, int64_t bytes);

  // --- end ---
  void close(std::string ending);
  // Says that nothing will be written any more; the kernel delivers the rest.
  void end_writing();

 private:
  // The frame that is being written.
  struct Writing {
    std::vector<char> bytes;  // header and, for control frames, payload
    size_t written = 0;
    OutgoingMessage* message = nullptr;  // whose piece follows the bytes
    int64_t piece_bytes = 0;
    int64_t piece_written = 0;

    bool is_done() const { return written == bytes.size() && piece_written == piece_bytes; }
  };

  bool next_frame();
  // True when this completes a message.
  bool note_written(size_t written);
  void stop_writing();

  // Makes sense of what lies in buffer_; false when it is no frame.
  bool parse(FrameReader& reader);
  bool is_sound(const FrameHeader& header) const;

  const int peer_;
  Socket socket_;
  std::string ending_;

  std::deque<std::vector<char>> control_;  // complete frames
  std::deque<OutgoingMessage*> messages_;  // served in turn, a piece each
  Writing writing_;
  bool is_writing_ = false;

  std::vector<char> buffer_;
  size_t buffer_begin_ = 0;
  size_t buffer_end_ = 0;
  FrameHeader header_;  // of the frame that is being read
  bool in_frame_ = false;
  int64_t frame_left_ = 0;  // of its payload
  char* place_ = nullptr;   // of its next byte; nullptr: nowhere
};

}  // namespace fsdp
