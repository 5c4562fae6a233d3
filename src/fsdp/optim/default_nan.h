// Every NaN that an aarch64 thread computes within a scope is the usual one, 0x7FC00000 in fp32,
// whatever bits the NaN had that it came from.
#pragma once

#if defined(__aarch64__)

#include <cstdint>

namespace fsdp {

// Only for calls that are not inlined: compilers know nothing of the mode.
class DefaultNan {
 public:
  DefaultNan() : before_(mode()) { set_mode(before_ | kDefaultNan); }
  ~DefaultNan() { set_mode(before_); }
  DefaultNan(const DefaultNan&) = delete;
  DefaultNan& operator=(const DefaultNan&) = delete;

 private:
  static constexpr uint64_t kDefaultNan = uint64_t{1} << 25;  // of the register's bits: "DN"

  static uint64_t mode() {
    uint64_t mode = 0;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }

  const uint64_t before_;
};

}  // namespace fsdp

#endif  // __aarch64__
