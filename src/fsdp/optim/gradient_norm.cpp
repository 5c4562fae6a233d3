#include "fsdp/optim/gradient_norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "fsdp/base/integer.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/optim/span_update.h"
#include "fsdp/optim/update_on_cpu.h"
#include "fsdp/optim/update_on_device.h"

namespace fsdp {

namespace {

// Sums of these many elements are added up in order, so threads make no difference.
constexpr int64_t kChunk = 65536;

}  // namespace

void add_squared_norm(const at::Tensor& gradient, const at::Tensor& sum,
                      const at::Tensor& workspace, ThreadTeam& team) {
  const DType dtype = dtype_of(gradient.scalar_type());
  const int64_t numel = gradient.numel();
  if (!sum.is_cpu()) {
    squared_sum_on_device(gradient.const_data_ptr(), dtype, numel, sum.mutable_data_ptr<double>(),
                          workspace.mutable_data_ptr<double>(),
                          current_stream(sum.device()).native_handle());
    return;
  }
  const auto* bytes = static_cast<const std::byte*>(gradient.const_data_ptr());
  std::vector<double> sums(static_cast<size_t>(ceil_div(numel, kChunk)));
  team.run(static_cast<int64_t>(sums.size()), [&](int64_t i) {
    sums[static_cast<size_t>(i)] = squared_sum_on_cpu(bytes + i * kChunk * element_bytes(dtype),
                                                      dtype, std::min(kChunk, numel - i * kChunk));
  });
  *sum.mutable_data_ptr<double>() += std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace fsdp
