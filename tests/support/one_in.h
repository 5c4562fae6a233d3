// A part of the combinations that nested loops make, for `make test`.
#pragma once

#include <cstdlib>
#include <string_view>

namespace fsdp::testing {

// Takes one combination in `n` where the environment says FSDP_TESTS=once, else every one. Neither
// the length of an inner loop nor the product of all of them may have a divisor in common with `n`:
// else the same values would be taken every time.
class OneIn {
 public:
  explicit OneIn(int n) : n_(is_once() ? n : 1) {}
  // Asked once for each combination.
  bool skips() { return number_++ % n_ != 0; }

 private:
  static bool is_once() {
    const char* tests = std::getenv("FSDP_TESTS");
    return tests != nullptr && std::string_view(tests) == "once";
  }

  const int n_;
  int number_ = 0;
};

}  // namespace fsdp::testing
