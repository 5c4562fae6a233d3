// TCP sockets: owned descriptors, addresses, connecting and listening.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

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

// Listens at an address of this host, at any free port. An Error when it is not of this host.
Socket listen_at(const std::string& host, int backlog);

// An empty socket when nobody has called yet.
Socket try_accept(const Socket& listener);

// Where a listening socket listens, in numbers.
Endpoint endpoint_of(const Socket& listener);

// The address of this host, in numbers, that packets to `endpoint` leave from.
std::string address_towards(const Endpoint& endpoint);

// Whether an address in numbers is seen on its own host only.
bool is_loopback(const std::string& address);

// Sends small messages at once, and notices in about a minute when the other host is gone.
void prepare_for_messages(const Socket& socket);

// Sends or receives exactly that many bytes; false when the connection ends or the deadline passes.
bool send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline);
bool receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline);

}  // namespace fsdp
