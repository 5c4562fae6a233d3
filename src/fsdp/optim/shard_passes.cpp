#include "fsdp/optim/shard_passes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <vector>

#include "fsdp/base/exact_sum.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/optim/kernels/update_kernels.h"
#include "fsdp/shard/group/flat_buffer.h"

namespace fsdp {

namespace {

// For fewer elements, waking a thread takes longer than the update.
constexpr int64_t kWorthAThread = 32768;
// With fewer elements, the start of a part costs too much, since nothing is prefetched for it.
constexpr int64_t kWorthAPart = 131072;

// How many parts threads cut a span into. All threads wait for the last one, and the more threads
// there are, the likelier one is late: so each of many threads takes several parts in turn.
int64_t num_parts(int64_t numel, int64_t num_threads) {
  const int64_t num_awake = std::clamp<int64_t>(numel / kWorthAThread, 1, num_threads);
  const int64_t most = num_threads * std::clamp<int64_t>(num_threads / 2, 1, 8);
  return std::clamp(numel / kWorthAPart, num_awake, most);
}

// Sums of this many elements are added up in order, so that threads make no difference.
constexpr int64_t kChunk = 65536;

}  // namespace

void update_on_cpu(const UpdateSpan& span, const UpdateMath& math, const StepState& state,
                   ThreadTeam& team) {
  const int64_t count = num_parts(span.numel, team.size());
  team.run(count, [&](int64_t i) {
    const ElementRange part = piece_of_span(span, i, count);
    if (const auto* adamw = std::get_if<AdamWRule>(&math))
      adamw_on_cpu(span, *adamw, state, part);
    else
      sgd_on_cpu(span, std::get<SgdRule>(math), state, part);
  });
}

void update_on_device(const UpdateSpan& span, const UpdateMath& math, const StepState* state,
                      c10::Device device) {
  void* stream = current_stream(device).native_handle();
  if (const auto* adamw = std::get_if<AdamWRule>(&math))
    adamw_on_device(span, *adamw, state, stream);
  else
    sgd_on_device(span, std::get<SgdRule>(math), state, stream);
}

void update_span(const UpdateSpan& span, const UpdateMath& math, const at::Tensor& state,
                 ThreadTeam& team) {
  const auto* fields = static_cast<const StepState*>(state.const_data_ptr());
  if (state.is_cpu())
    update_on_cpu(span, math, *fields, team);
  else
    update_on_device(span, math, fields, state.device());
}

at::Tensor field_of(const at::Tensor& state, size_t offset, at::ScalarType dtype) {
  return tensor_over(static_cast<std::byte*>(state.mutable_data_ptr()) + offset, 1, dtype,
                     state.device());
}

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

void add_exact_squares(const at::Tensor& gradient, const at::Tensor& digits, ThreadTeam& team) {
  const DType dtype = dtype_of(gradient.scalar_type());
  const int64_t numel = gradient.numel();
  if (!digits.is_cpu()) {
    add_exact_squares_on_device(gradient.const_data_ptr(), dtype, numel,
                                digits.mutable_data_ptr<int64_t>(),
                                current_stream(digits.device()).native_handle());
    return;
  }
  const auto* bytes = static_cast<const std::byte*>(gradient.const_data_ptr());
  using Digits = std::array<int64_t, ExactSum::kCount>;
  std::vector<Digits> sums(static_cast<size_t>(ceil_div(numel, kChunk)), Digits{});
  team.run(static_cast<int64_t>(sums.size()), [&](int64_t i) {
    add_exact_squares_on_cpu(bytes + i * kChunk * element_bytes(dtype), dtype,
                             std::min(kChunk, numel - i * kChunk),
                             sums[static_cast<size_t>(i)].data());
  });
  auto* total = digits.mutable_data_ptr<int64_t>();
  for (const Digits& sum : sums)
    for (size_t digit = 0; digit < sum.size(); ++digit) total[digit] += sum[digit];
}

void read_exact_sum(const at::Tensor& digits, const at::Tensor& sum) {
  if (digits.is_cpu()) {
    *sum.mutable_data_ptr<double>() = ExactSum::value_of(digits.const_data_ptr<int64_t>());
    return;
  }
  // Whole numbers of 2^31 and more are rounded alike on every rank; so is their sum.
  const at::Tensor numbers = digits.narrow(0, 0, ExactSum::kDigits).to(at::kDouble);
  const at::Tensor exponents =
      at::arange(ExactSum::kDigits, numbers.options()) * 32 - ExactSum::kBelowPoint;
  const at::Tensor value = (numbers * exponents.exp2()).sum();
  const at::Tensor is_sum = digits.select(0, ExactSum::kDigits).eq(0);
  sum.copy_(at::where(is_sum, value, std::numeric_limits<double>::quiet_NaN()).view(1));
}

}  // namespace fsdp
