// Runs code of the overlapped AdamW that a test has assembled (aarch64).
#pragma once

#if defined(__aarch64__)

#include <sys/mman.h>

#include <cstring>

#include "fsdp/base/error.h"
#include "fsdp/optim/overlapped_code.h"

namespace fsdp::testing {

class RunnableCode {
 public:
  explicit RunnableCode(const overlapped::Code& code) {
    FSDP_CHECK(memory_ != MAP_FAILED, "no memory to run code in");
    std::memcpy(memory_, code.words.data(), sizeof(code.words));
    auto* const begin = static_cast<char*>(memory_);
    __builtin___clear_cache(begin, begin + sizeof(code.words));
  }
  ~RunnableCode() { munmap(memory_, sizeof(overlapped::Code)); }
  RunnableCode(const RunnableCode&) = delete;
  RunnableCode& operator=(const RunnableCode&) = delete;

  const void* address() const { return memory_; }
  void operator()(const overlapped::Frame& frame) const {
    reinterpret_cast<void (*)(const overlapped::Frame&)>(memory_)(frame);
  }

 private:
  void* memory_ = mmap(nullptr, sizeof(overlapped::Code), PROT_READ | PROT_WRITE | PROT_EXEC,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
};

}  // namespace fsdp::testing

#endif  // __aarch64__
