// Parts of weights are quantised on a device to the bits that a host makes of them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/shard/group/pack_on_device.h"
#include "fsdp/shard/group/quantize_part.h"
#include "support/require.h"

#define FSDP_REQUIRE_DEVICE_KERNELS() \
  FSDP_REQUIRE_GPU();                 \
  if (!has_device_packs()) GTEST_SKIP() << "built without CUDA kernels"

namespace fsdp::quantize_part_device_test {
namespace {

// A row of zeros, one of small numbers, one with Inf and NaN, and numbers of all sizes.
at::Tensor numbers(int64_t rows, int64_t columns) {
  at::manual_seed(5);
  at::Tensor x = at::randn({rows, columns}) * at::exp(at::randn({rows, columns}) * 4.0);
  x[0].zero_();
  if (rows > 1) x[1].mul_(1e-30);
  if (rows > 2) x[2][0] = std::numeric_limits<float>::infinity();
  if (rows > 2) x[2][columns - 1] = std::numeric_limits<float>::quiet_NaN();
  return x;
}

struct Quantized {
  at::Tensor amaxes, factors, scales, codes, block_scales, counts;
};

// One part, as the only one of the matrix.
Quantized quantized(const at::Tensor& matrix, FlatRange range, WeightRecipe recipe,
                    c10::Device device) {
  const at::Tensor values = matrix.flatten().narrow(0, range.begin, range.numel()).to(device);
  const SharedScales shared = shared_scales(recipe, matrix.size(0), matrix.size(1));
  const WeightRecipeRow& row = row_of(recipe);
  const auto on = at::TensorOptions().device(device);
  Quantized q{at::zeros({shared.count}, on.dtype(at::kInt)),
              at::zeros({shared.count}, on.dtype(at::kFloat)),
              at::zeros({shared.count}, on.dtype(at::kFloat)),
              at::zeros({range.numel()}, on.dtype(at::kByte)),
              at::zeros({row.scale_bytes == 1 ? range.numel() / row.scale_columns : 0},
                        on.dtype(at::kByte)),
              at::zeros({2}, on.dtype(at::kLong))};
  const MatrixPart part{values.const_data_ptr<float>(), range, matrix.size(0), matrix.size(1)};
  auto* amaxes = reinterpret_cast<uint32_t*>(q.amaxes.mutable_data_ptr<int32_t>());
  float* factors = q.factors.mutable_data_ptr<float>();
  float* scales = q.scales.mutable_data_ptr<float>();
  const QuantizedPart into{q.codes.mutable_data_ptr<uint8_t>(),
                           q.block_scales.mutable_data_ptr<uint8_t>(),
                           reinterpret_cast<QuantizeCounts*>(q.counts.mutable_data_ptr<int64_t>())};
  if (device.is_cpu()) {
    if (shared.count > 0) amax_on_host(part, shared, amaxes);
    factors_on_host(amaxes, shared.count, factors, scales);
    quantize_on_host(part, recipe, factors, into);
  } else {
    if (shared.count > 0) amax_on_device(part, shared, amaxes, nullptr);
    factors_on_device(amaxes, shared.count, factors, scales, nullptr);
    quantize_on_device(part, recipe, factors, into, nullptr);
  }
  for (at::Tensor* each : {&q.amaxes, &q.factors, &q.scales, &q.codes, &q.block_scales, &q.counts})
    *each = each->cpu();
  return q;
}

void expect_same(const at::Tensor& device, const at::Tensor& host, const std::string& what) {
  // Compares bits, so that NaN equals NaN.
  const auto bits = [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat ? tensor.view(at::kInt) : tensor;
  };
  EXPECT_TRUE(at::equal(bits(device), bits(host))) << what;
}

TEST(QuantizePartOnDevice, HasTheBitsOfTheHost) {
  FSDP_REQUIRE_DEVICE_KERNELS();
  for (const WeightRecipeRow& row : all_weight_recipes()) {
    if (row.recipe == WeightRecipe::kPlain) continue;
    const bool has_blocks = row.scale_bytes == 1;
    for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
             {3, 32}, {131, 160}, {300, 2048}, {257, 416}, {5, 7}}) {
      if (has_blocks && columns % row.scale_columns != 0) continue;
      const at::Tensor matrix = numbers(rows, columns);
      const int64_t numel = matrix.numel();
      std::vector<FlatRange> ranges = {{0, numel}};
      if (numel > 512) ranges.push_back({128, numel - (has_blocks ? 128 : 3)});
      if (numel > 4096) ranges.push_back({1024, 1024 + 2048});
      for (const FlatRange& range : ranges) {
        const Quantized host = quantized(matrix, range, row.recipe, c10::kCPU);
        const Quantized device = quantized(matrix, range, row.recipe, c10::Device(c10::kCUDA, 0));
        const std::string what = concat(row.name, " ", rows, " x ", columns, " from ", range.begin);
        expect_same(device.amaxes, host.amaxes, what + ": amaxes");
        expect_same(device.scales, host.scales, what + ": scales");
        expect_same(device.codes, host.codes, what + ": codes");
        expect_same(device.block_scales, host.block_scales, what + ": scales of blocks");
        expect_same(device.counts, host.counts, what + ": counts");
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::quantize_part_device_test
