// Gradients on a device that wait for others of their group, so that one launch brings them all to
// where they are reduced from.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp {

class HeldGradients {
 public:
  // What a group holds back at most, so that a large gradient's memory is not kept waiting.
  static constexpr int64_t kMaxBytes = int64_t{16} << 20;

  enum class How : uint8_t { kWrite, kAdd };

  // Whether `gradient` can wait: both on a device with kernels, of types that they take, and
  // contiguous.
  static bool takes(const at::Tensor& target, const at::Tensor& gradient);

  // Keeps the gradient until pack(), which writes it to the target or adds it, casting, as copy_()
  // and add_() would have now. All targets have one type.
  void hold(const at::Tensor& target, const at::Tensor& gradient, How how);

  // On the current stream, where whoever reads the targets comes after it.
  void pack();

  // After an error.
  void drop() noexcept;

 private:
  struct Entry {
    at::Tensor target;
    at::Tensor gradient;
    How how;
  };

  std::vector<Entry> entries_;
  int64_t num_bytes_ = 0;
  std::optional<c10::Stream> stream_;  // of the entries
};

}  // namespace fsdp
