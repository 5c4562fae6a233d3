#include "fsdp/nn/kernels/kernel_calls.h"

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <string>

#include "fsdp/base/env.h"

namespace fsdp::nn {

namespace {

bool are_wanted() {
  static const bool wanted = [] {
    const std::array<std::string, 2> choices = {"kernels", "aten"};
    return env_choice("FSDP_LAYERS", choices, 0) == 0;
  }();
  return wanted;
}

}  // namespace

bool has_kernels_on(const at::Device& device) {
  return device.is_cuda() && has_device_layers() && are_wanted();
}

bool has_kernels(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return has_kernels_on(tensor.device()) &&
         (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf);
}

bool begins_a_pack(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

at::Tensor dense_packs(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  return begins_a_pack(dense) ? dense : dense.clone();
}

}  // namespace fsdp::nn
