#include "fsdp/comm/tcp/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

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
  // What cannot be set only makes things slower.
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

}  // namespace fsdp
