#include "fsdp/comm/tcp/tcp_connection.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const Endpoint& endpoint, int kind, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = kind;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  const int code =
      getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  FSDP_CHECK(code == 0, "host '", endpoint.host, "' has no address: ", gai_strerror(code));
  return Addresses(found, &freeaddrinfo);
}

Socket open_socket(const addrinfo& address, int flags) {
  return Socket(
      ::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | flags, address.ai_protocol));
}

void set_option(const Socket& socket, int level, int option, int value) {
  // An option that cannot be set only makes things slower.
  static_cast<void>(::setsockopt(socket.fd(), level, option, &value, sizeof(value)));
}

std::string numeric_host(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST];
  const int code = getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host,
                               sizeof(host), nullptr, 0, NI_NUMERICHOST);
  FSDP_CHECK(code == 0, "this host's own address cannot be read: ", gai_strerror(code));
  return host;
}

// Whether the socket becomes ready for `events` before the deadline.
bool wait_for(const Socket& socket, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{socket.fd(), events, 0};
    const int ready = ::poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 60'000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (Clock::now() >= deadline) return false;
  }
}

// Sends or receives in pieces until all is done.
template <typename Move>
bool move_all(const Socket& socket, size_t bytes, short events, Deadline deadline, Move move) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t moved = move(done);
    if (moved > 0) {
      done += static_cast<size_t>(moved);
      continue;
    }
    if (moved == 0) return false;
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
    if (!wait_for(socket, events, deadline)) return false;
  }
  return true;
}

constexpr size_t kBufferBytes = size_t{32} << 10;
// The most that one read() takes before other connections get their turn.
constexpr int64_t kReadBytes = int64_t{1} << 20;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

std::vector<char> frame_bytes_of(const FrameHeader& header, std::string_view payload) {
  std::vector<char> bytes(sizeof(header) + payload.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::copy(payload.begin(), payload.end(), bytes.begin() + sizeof(header));
  return bytes;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::string Endpoint::text() const {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return concat(is_ipv6 ? "[" : "", host, is_ipv6 ? "]:" : ":", port);
}

Socket try_connect(const Endpoint& endpoint, Deadline deadline) {
  const Addresses found = resolve(endpoint, SOCK_STREAM, 0);
  for (const addrinfo* address = found.get(); address != nullptr; address = address->ai_next) {
    Socket socket = open_socket(*address, SOCK_NONBLOCK);
    if (!socket) continue;
    if (::connect(socket.fd(), address->ai_addr, address->ai_addrlen) == 0) return socket;
    if (errno != EINPROGRESS || !wait_for(socket, POLLOUT, deadline)) continue;
    int code = 0;
    socklen_t length = sizeof(code);
    ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &code, &length);
    if (code == 0) return socket;
  }
  return Socket();
}

Socket start_connecting(const Endpoint& endpoint) {
  const Addresses found = resolve(endpoint, SOCK_STREAM, AI_NUMERICHOST);
  Socket socket = open_socket(*found, SOCK_NONBLOCK);
  if (!socket) return Socket();
  const int code = ::connect(socket.fd(), found->ai_addr, found->ai_addrlen);
  return code == 0 || errno == EINPROGRESS ? std::move(socket) : Socket();
}

Socket listen_at(const Endpoint& endpoint) {
  const Addresses found = resolve(endpoint, SOCK_STREAM, AI_PASSIVE);
  for (const addrinfo* address = found.get(); address != nullptr; address = address->ai_next) {
    Socket socket = open_socket(*address, SOCK_NONBLOCK);
    if (!socket) continue;
    // Connections of an earlier job at this port may linger for a minute.
    if (endpoint.port != 0) set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
    if (::bind(socket.fd(), address->ai_addr, address->ai_addrlen) != 0) continue;
    if (::listen(socket.fd(), SOMAXCONN) == 0) return socket;
  }
  const bool is_taken = errno == EADDRINUSE;
  throw CommError(concat(
      "cannot listen at ", endpoint.text(), ": ", std::strerror(errno),
      is_taken ? "; choose another port" : "; set FSDP_HOST_ADDRESS to an address of this host"));
}

Socket try_accept(const Socket& listener) {
  return Socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

Endpoint endpoint_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length);
  const uint16_t port = address.ss_family == AF_INET6
                            ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                            : reinterpret_cast<const sockaddr_in*>(&address)->sin_port;
  return {numeric_host(address, length), ntohs(port)};
}

// A datagram socket is "connected" without a packet: the kernel looks up the route and no more.
std::string own_address(const std::string& host) {
  const Addresses own = resolve({host, 0}, SOCK_DGRAM, 0);
  for (const addrinfo* to = own.get(); to != nullptr; to = to->ai_next) {
    const Socket socket = open_socket(*to, 0);
    if (socket && ::bind(socket.fd(), to->ai_addr, to->ai_addrlen) == 0)
      return endpoint_of(socket).host;
  }
  constexpr int kAnyPort = 9;
  const Addresses other = resolve({host, kAnyPort}, SOCK_DGRAM, 0);
  for (const addrinfo* to = other.get(); to != nullptr; to = to->ai_next) {
    const Socket socket = open_socket(*to, 0);
    if (socket && ::connect(socket.fd(), to->ai_addr, to->ai_addrlen) == 0)
      return endpoint_of(socket).host;
  }
  throw CommError(concat("this host has no route to '", host,
                         "': set FSDP_HOST_ADDRESS to the address at which others reach it"));
}

bool is_loopback(const std::string& address) {
  return address == "::1" || address.rfind("127.", 0) == 0;
}

void prepare_for_messages(const Socket& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

bool send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline) {
  return move_all(socket, bytes, POLLOUT, deadline, [&](size_t done) {
    return ::send(socket.fd(), static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
  });
}

bool receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline) {
  return move_all(socket, bytes, POLLIN, deadline, [&](size_t done) {
    return ::recv(socket.fd(), static_cast<char*>(data) + done, bytes - done, 0);
  });
}

void TcpConnection::open(Socket socket) {
  socket_ = std::move(socket);
  buffer_.resize(kBufferBytes);
}

void TcpConnection::enqueue_frame(FrameHeader header, std::string_view payload) {
  header.frame_bytes = static_cast<int64_t>(payload.size());
  control_.push_back(frame_bytes_of(header, payload));
}

void TcpConnection::enqueue_message(OutgoingMessage& message) { messages_.push_back(&message); }

void TcpConnection::cancel(const OutgoingMessage& message) noexcept {
  std::erase(messages_, &message);
  if (writing_.message != &message) return;
  const char* rest = message.data + message.sent_bytes + writing_.piece_written;
  writing_.bytes.insert(writing_.bytes.end(), rest,
                        rest + (writing_.piece_bytes - writing_.piece_written));
  writing_.message = nullptr;
  writing_.piece_bytes = writing_.piece_written = 0;
}

bool TcpConnection::wants_to_write() const {
  return is_open() && (is_writing_ || !control_.empty() || !messages_.empty());
}

// Takes the next frame to write; false when there is none.
bool TcpConnection::next_frame() {
  if (is_writing_) return true;
  writing_ = Writing{};
  if (!control_.empty()) {
    writing_.bytes = std::move(control_.front());
    control_.pop_front();
  } else if (!messages_.empty()) {
    OutgoingMessage& message = *messages_.front();
    messages_.pop_front();
    writing_.message = &message;
    writing_.piece_bytes = std::min(kMaxFrameBytes, message.bytes - message.sent_bytes);
    writing_.bytes = frame_bytes_of(
        {FrameKind::kData, message.channel, message.bytes, writing_.piece_bytes}, {});
  } else {
    return false;
  }
  is_writing_ = true;
  return true;
}

bool TcpConnection::note_written(size_t written) {
  const size_t of_bytes = std::min(written, writing_.bytes.size() - writing_.written);
  writing_.written += of_bytes;
  writing_.piece_written += static_cast<int64_t>(written - of_bytes);
  if (!writing_.is_done()) return false;
  is_writing_ = false;
  OutgoingMessage* message = std::exchange(writing_.message, nullptr);
  if (message == nullptr) return false;
  message->sent_bytes += writing_.piece_bytes;
  if (!message->is_sent()) messages_.push_back(message);
  return message->is_sent();
}

bool TcpConnection::write() {
  bool has_sent = false;
  while (is_open() && next_frame()) {
    iovec parts[2] = {};
    size_t num_parts = 0;
    if (writing_.written < writing_.bytes.size())
      parts[num_parts++] = {writing_.bytes.data() + writing_.written,
                            writing_.bytes.size() - writing_.written};
    if (writing_.message != nullptr) {
      const OutgoingMessage& message = *writing_.message;
      const char* piece = message.data + message.sent_bytes + writing_.piece_written;
      parts[num_parts++] = {const_cast<char*>(piece),
                            static_cast<size_t>(writing_.piece_bytes - writing_.piece_written)};
    }
    msghdr request{};
    request.msg_iov = parts;
    request.msg_iovlen = num_parts;
    const ssize_t written = ::sendmsg(socket_.fd(), &request, MSG_NOSIGNAL);
    if (written >= 0) {
      has_sent |= note_written(static_cast<size_t>(written));
    } else if (would_block()) {
      break;
    } else if (errno != EINTR) {
      // Reading will find the end of the connection, after what the peer said before it left.
      stop_writing();
    }
  }
  return has_sent;
}

bool TcpConnection::is_flushed() const {
  if (!is_open()) return true;
  int unacknowledged = 0;
  const bool knows = ::ioctl(socket_.fd(), SIOCOUTQ, &unacknowledged) == 0;
  return !wants_to_write() && (!knows || unacknowledged == 0);
}

bool TcpConnection::is_sound(const FrameHeader& header) const {
  if (header.channel < 0 || header.message_bytes < 0 || header.frame_bytes < 0) return false;
  if (header.frame_bytes > kMaxFrameBytes) return false;
  switch (header.kind) {
    case FrameKind::kData:
      return header.frame_bytes > 0 &&
             (header.message_bytes > kMaxFrameBytes || header.frame_bytes == header.message_bytes);
    case FrameKind::kFailure:
      return true;
    case FrameKind::kAnnounce:
    case FrameKind::kReady:
    case FrameKind::kGoodbye:
    case FrameKind::kTaken:
      return header.frame_bytes == 0;
  }
  return false;
}

bool TcpConnection::parse(FrameReader& reader) {
  while (true) {
    const size_t available = buffer_end_ - buffer_begin_;
    if (!in_frame_) {
      if (available < sizeof(header_)) return true;
      std::memcpy(&header_, buffer_.data() + buffer_begin_, sizeof(header_));
      if (!is_sound(header_)) return false;
      buffer_begin_ += sizeof(header_);
      frame_left_ = header_.frame_bytes;
      const std::optional<char*> place = reader.begin_frame(peer_, header_);
      if (!place) return false;
      place_ = *place;
      in_frame_ = true;
      continue;
    }
    const auto piece = static_cast<size_t>(
        std::min(frame_left_, static_cast<int64_t>(buffer_end_ - buffer_begin_)));
    if (place_ != nullptr && piece > 0) {
      std::memcpy(place_, buffer_.data() + buffer_begin_, piece);
      place_ += piece;
    }
    buffer_begin_ += piece;
    frame_left_ -= static_cast<int64_t>(piece);
    if (frame_left_ > 0) return true;
    in_frame_ = false;
    reader.end_frame(peer_, header_);
  }
}

void TcpConnection::read(FrameReader& reader) {
  for (int64_t taken = 0; is_open() && taken < kReadBytes;) {
    // A long payload goes straight to its place; headers and short ones through the buffer.
    const bool straight = in_frame_ && place_ != nullptr && buffer_begin_ == buffer_end_ &&
                          frame_left_ >= static_cast<int64_t>(kBufferBytes);
    if (!straight) {
      std::memmove(buffer_.data(), buffer_.data() + buffer_begin_, buffer_end_ - buffer_begin_);
      buffer_end_ -= std::exchange(buffer_begin_, 0);
    }
    char* target = straight ? place_ : buffer_.data() + buffer_end_;
    const size_t room = straight ? static_cast<size_t>(frame_left_) : kBufferBytes - buffer_end_;
    const ssize_t received = ::recv(socket_.fd(), target, room, 0);
    if (received == 0) return close("was closed");
    if (received < 0) {
      if (errno == EINTR) continue;
      if (!would_block()) close(concat("failed: ", std::strerror(errno)));
      return;
    }
    taken += received;
    if (straight) {
      place_ += received;
      frame_left_ -= received;
    } else {
      buffer_end_ += static_cast<size_t>(received);
    }
    if (!parse(reader)) return close("carried something that is not of this program");
    if (!straight && static_cast<size_t>(received) < room) return;  // nothing more for now
  }
}

void TcpConnection::stop_reading_into(const char* data, int64_t bytes) {
  if (place_ >= data && place_ < data + bytes) place_ = nullptr;
}

void TcpConnection::close(std::string ending) {
  socket_.close();
  ending_ = std::move(ending);
  stop_writing();
}

void TcpConnection::stop_writing() {
  control_.clear();
  messages_.clear();
  is_writing_ = false;
  writing_ = Writing{};
}

void TcpConnection::end_writing() {
  if (is_open()) ::shutdown(socket_.fd(), SHUT_WR);
}

}  // namespace fsdp
