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

// Begins to connect to an address in numbers; the socket becomes readable when that has failed or
// the other side says something. An empty socket when it cannot even begin; errno says why.
Socket start_connecting(const Endpoint& endpoint);

// Listens at an address of this host and that port, 0 for any free one. An Error when the address
// is not of this host or the port is taken.
Socket listen_at(const Endpoint& endpoint);

// An empty socket when nobody has called yet.
Socket try_accept(const Socket& listener);

// Where a socket listens, or its own end of a connection, in numbers.
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

}  // namespace fsdp
