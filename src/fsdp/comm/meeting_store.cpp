#include "fsdp/comm/meeting_store.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "fsdp/base/env.h"
#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// The first line: libtorch's messages go on with stack traces.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

class TorchStore final : public MeetingStore {
 public:
  TorchStore(const Endpoint& endpoint, const c10d::TCPStoreOptions& options) try
      : endpoint_(endpoint), store_(c10::make_intrusive<c10d::TCPStore>(endpoint_.host, options)) {
  } catch (const c10::Error& error) {
    throw CommError(concat("cannot open the store at MASTER_ADDR:MASTER_PORT, ", endpoint.text(),
                           ": ", first_line(error)));
  }

  void publish(const std::string& key, const std::string& text) override {
    guarded([&] {
      store_->set(key, std::vector<uint8_t>(text.begin(), text.end()));
      return 0;
    });
  }

  // Asks rather than waits: libtorch's waiting fills the terminal with warnings.
  std::optional<std::string> find(const std::string& key) override {
    return guarded([&]() -> std::optional<std::string> {
      if (!store_->check({key})) return std::nullopt;
      const std::vector<uint8_t> bytes = store_->get(key);
      return std::string(bytes.begin(), bytes.end());
    });
  }

 private:
  template <typename Body>
  auto guarded(Body body) -> decltype(body()) {
    try {
      return body();
    } catch (const c10::Error& error) {
      throw CommError(concat("the store at MASTER_ADDR:MASTER_PORT, ", endpoint_.text(),
                             ", does not answer any more: ", first_line(error)));
    }
  }

  const Endpoint endpoint_;
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
                            " s: ", agent_holds_store() ? "torchrun's agent" : "rank 0",
                            " should; look at what it does, or correct the address"));
}

}  // namespace

bool agent_holds_store() { return env_text("TORCHELASTIC_USE_AGENT_STORE") == "True"; }

std::string meeting_prefix() {
  return concat("fsdp/", env_text("TORCHELASTIC_RUN_ID").value_or("job"), "/",
                env_text("TORCHELASTIC_RESTART_COUNT").value_or("0"), "/");
}

std::shared_ptr<MeetingStore> open_meeting_store(const Launch& launch, Deadline deadline) {
  // One per process, for good: a second World finds rank 0's store still open.
  static std::mutex mutex;
  static std::shared_ptr<MeetingStore> opened;
  const std::lock_guard lock(mutex);
  if (opened) return opened;
  const Endpoint endpoint{launch.master_address, launch.master_port};
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.master_port);
  options.isServer = launch.rank == 0 && !agent_holds_store();
  options.waitWorkers = false;
  options.timeout =
      std::max(std::chrono::milliseconds(1000),
               std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
  if (!options.isServer) wait_until_somebody_listens(endpoint, deadline);
  opened = std::make_shared<TorchStore>(endpoint, options);
  return opened;
}

}  // namespace fsdp
