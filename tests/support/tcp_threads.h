// Ranks that are threads of one process, yet talk through TCP: a sanitizer sees all of them.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/comm/tcp/tcp_mesh.h"

namespace fsdp::testing {

class PlaceInMemory final : public MeetingPlace {
 public:
  void announce(const Endpoint& endpoint) override {
    const std::lock_guard lock(mutex_);
    endpoint_ = endpoint;
  }

  std::optional<Endpoint> find() override {
    const std::lock_guard lock(mutex_);
    ++num_finds_;
    return endpoint_;
  }

  int num_finds() const { return num_finds_; }

 private:
  std::mutex mutex_;
  std::atomic<int> num_finds_ = 0;
  std::optional<Endpoint> endpoint_;
};

inline TcpMeshOptions mesh_options(int rank, int size) {
  TcpMeshOptions options;
  options.rank = rank;
  options.size = size;
  options.listen.host = "127.0.0.1";
  options.meeting = "test";
  options.timeout_seconds = 30;
  return options;
}

// Runs every body in a thread of its own; returns each one's error, "" for none.
inline std::vector<std::string> run_beside(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::string> errors(bodies.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < bodies.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        bodies[i]();
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Connects `size` ranks; with `max_meshed_ranks` below it, by their first messages.
inline std::vector<std::string> run_connected(
    int size, const std::function<void(int rank, TcpMesh mesh)>& body,
    int max_meshed_ranks = TcpMeshOptions{}.max_meshed_ranks) {
  PlaceInMemory place;
  std::vector<std::function<void()>> bodies;
  for (int rank = 0; rank < size; ++rank)
    bodies.push_back([&, rank] {
      TcpMeshOptions options = mesh_options(rank, size);
      options.max_meshed_ranks = max_meshed_ranks;
      body(rank, connect_tcp_mesh(place, options));
    });
  return run_beside(bodies);
}

}  // namespace fsdp::testing
