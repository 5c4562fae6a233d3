#include "fsdp/train/stop_request.h"

#include <unistd.h>
#include <csignal>
#include <cstring>

#include <atomic>

#include "fsdp/base/check.h"

namespace fsdp::train {

namespace {

std::atomic<int> requested{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may not lock");

struct sigaction before_interrupt;
struct sigaction before_terminate;

// Does only what is allowed in a signal handler.
void on_signal(int signal) {
  int expected = 0;
  if (requested.compare_exchange_strong(expected, signal)) return;
  constexpr char kWords[] = "\nfsdp: stopped at once; what was not saved is lost.\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kWords, sizeof(kWords) - 1);
  ::_exit(128 + signal);
}

}  // namespace

StopRequest::StopRequest() {
  requested = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // reads and writes under way continue
  FSDP_CHECK(::sigaction(SIGINT, &action, &before_interrupt) == 0 &&
                 ::sigaction(SIGTERM, &action, &before_terminate) == 0,
             "signals cannot be handled: ", std::strerror(errno));
}

StopRequest::~StopRequest() {
  ::sigaction(SIGINT, &before_interrupt, nullptr);
  ::sigaction(SIGTERM, &before_terminate, nullptr);
}

int StopRequest::signal() const { return requested; }

const char* signal_name(int signal) { return signal == SIGINT ? "SIGINT" : "SIGTERM"; }

}  // namespace fsdp::train
