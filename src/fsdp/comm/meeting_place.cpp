#include "fsdp/comm/meeting_place.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "fsdp/base/env.h"
#include "fsdp/base/shown_text.h"
#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// Rank 0 is where everybody was told it would be.
class KnownPlace final : public MeetingPlace {
 public:
  explicit KnownPlace(Endpoint endpoint) : endpoint_(std::move(endpoint)) {}
  void announce(const Endpoint& /*endpoint*/) override {}
  std::optional<Endpoint> find() override { return endpoint_; }

 private:
  const Endpoint endpoint_;
};

// The first line: libtorch's messages go on with stack traces.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return shown(text.substr(0, text.find('\n')), 500);
}

class AgentStore final : public MeetingPlace {
 public:
  AgentStore(const Endpoint& endpoint, const c10d::TCPStoreOptions& options, std::string key)
      : endpoint_(endpoint), key_(std::move(key)), store_(guarded([&] {
          return c10::make_intrusive<c10d::TCPStore>(endpoint.host, options);
        })) {}

  void announce(const Endpoint& endpoint) override {
    const std::string text = concat(endpoint.host, " ", endpoint.port);
    guarded([&] {
      store_->set(key_, std::vector<uint8_t>(text.begin(), text.end()));
      return 0;
    });
  }

  // Asks rather than waits: libtorch's waiting fills the terminal with warnings.
  std::optional<Endpoint> find() override {
    return guarded([&]() -> std::optional<Endpoint> {
      if (!store_->check({key_})) return std::nullopt;
      const std::vector<uint8_t> bytes = store_->get(key_);
      std::istringstream in(std::string(bytes.begin(), bytes.end()));
      Endpoint found;
      in >> found.host >> found.port;
      return in ? std::optional(found) : std::nullopt;
    });
  }

 private:
  template <typename Body>
  auto guarded(Body body) -> decltype(body()) {
    try {
      return body();
    } catch (const c10::Error& error) {
      throw CommError(concat("the store of torchrun at MASTER_ADDR:MASTER_PORT, ", endpoint_.text(),
                             ", does not answer: ", first_line(error)));
    }
  }

  const Endpoint endpoint_;
  const std::string key_;
  const c10::intrusive_ptr<c10d::TCPStore> store_;
};

// libtorch would report every failed attempt; so it is asked only when somebody listens.
void wait_until_somebody_listens(const Endpoint& endpoint, Deadline deadline) {
  const auto begin = Clock::now();
  while (true) {
    const Deadline attempt = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    if (try_connect(endpoint, attempt)) return;
    if (Clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::chrono::duration<double> waited = Clock::now() - begin;
  throw TimeoutError(concat("nobody listens at MASTER_ADDR:MASTER_PORT, ", endpoint.text(),
                            ", after ", static_cast<int64_t>(waited.count() + 0.5),
                            " s: torchrun's agent should; look at what it does, or correct the "
                            "address"));
}

}  // namespace

bool agent_holds_store() { return env_text("TORCHELASTIC_USE_AGENT_STORE") == "True"; }

std::unique_ptr<MeetingPlace> open_meeting_place(const Launch& launch, const std::string& meeting,
                                                 Deadline deadline) {
  const Endpoint endpoint{launch.master_address, launch.master_port};
  if (!agent_holds_store()) return std::make_unique<KnownPlace>(endpoint);
  wait_until_somebody_listens(endpoint, deadline);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.master_port);
  options.waitWorkers = false;
  options.timeout =
      std::max(std::chrono::milliseconds(1000),
               std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
  return std::make_unique<AgentStore>(endpoint, options, meeting);
}

}  // namespace fsdp
