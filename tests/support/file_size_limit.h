// Simulates a full disk: in its scope no file of this process grows beyond so many bytes.
#pragma once

#include <sys/resource.h>

#include <csignal>

#include "fsdp/base/check.h"

namespace fsdp::testing {

// Writing more fails with EFBIG (instead of ENOSPC) after the bytes that fit.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t max_bytes) : signal_(std::signal(SIGXFSZ, SIG_IGN)) {
    FSDP_CHECK(::getrlimit(RLIMIT_FSIZE, &before_) == 0, "the limit of file sizes is unknown");
    const rlimit limit{.rlim_cur = max_bytes, .rlim_max = before_.rlim_max};
    FSDP_CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0, "no limit of file sizes of ", max_bytes);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, signal_);
  }

 private:
  rlimit before_{};
  void (*signal_)(int);  // the handler of SIGXFSZ before
};

}  // namespace fsdp::testing
