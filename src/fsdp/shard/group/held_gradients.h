// Gradients on a device that wait for others of their group, so that one launch brings all of them
// to the buffer that is reduced.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp {

class HeldGradients {
 public:
  // The most that a group holds back, so that a large gradient's memory does not wait.
  static constexpr int64_t kMaxBytes = int64_t{16} << 20;

  enum class How : uint8_t { kWrite, kAdd };

  // Whether `gradient` can wait: both are on a device with kernels, contiguous, and of types that
  // the kernels take.
  static bool takes(const at::Tensor& target, const at::Tensor& gradient);

  // Keeps the gradient until pack(), which writes it to the target or adds it, casting, as copy_()
  // and add_() would do now. All targets have one type.
  void hold(const at::Tensor& target, const at::Tensor& gradient, How how);

  // On the current stream, on which all readers of the targets come later.
  void pack();

  // Drops all without writing them.
  void reset() noexcept;

 private:
  struct Held {
    at::Tensor target;
    at::Tensor gradient;
    How how;
  };

  std::vector<Held> held_;
  int64_t num_bytes_ = 0;
  std::optional<c10::Stream> stream_;  // of the entries
};

}  // namespace fsdp
