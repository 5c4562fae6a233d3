#include <ATen/ATen.h>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/quantized_bytes.h"
#include "fsdp/nn/layers/quantized_rows.h"
#include "fsdp/shard/group/quantize_part.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

namespace {

// What QuantizedWeights does with a matrix after an update: largest magnitudes, factors, codes.
class QuantizedMatrix {
 public:
  QuantizedMatrix(WeightRecipe recipe, int64_t elements, const WorkPlace& place)
      : recipe_(recipe),
        device_(place.device),
        numbers_(some_numbers(rows_of(elements), place).to(at::kFloat)),
        scales_(shared_scales(recipe, numbers_.size(0), numbers_.size(1))),
        amaxes_(at::zeros({scales_.count}, numbers_.options().dtype(at::kInt))),
        factors_(at::zeros({2, scales_.count}, numbers_.options())),
        codes_(at::zeros({elements}, numbers_.options().dtype(at::kByte))),
        counts_(at::zeros({2}, numbers_.options().dtype(at::kLong))) {}

  void quantize() const {
    const MatrixPart part{.values = numbers_.const_data_ptr<float>(),
                          .range = {0, numbers_.numel()},
                          .rows = numbers_.size(0),
                          .columns = numbers_.size(1)};
    auto* amaxes = reinterpret_cast<uint32_t*>(amaxes_.mutable_data_ptr<int32_t>());
    auto* factors = factors_.mutable_data_ptr<float>();
    const QuantizedPart into{
        .codes = codes_.mutable_data_ptr<uint8_t>(),
        .counts = reinterpret_cast<QuantizeCounts*>(counts_.mutable_data_ptr<int64_t>())};
    amaxes_.zero_();
    if (device_.is_cpu()) {
      amax_on_host(part, scales_, amaxes);
      factors_on_host(recipe_, amaxes, scales_.count, factors, factors + scales_.count);
      quantize_on_host(part, recipe_, factors, into);
    } else {
      void* stream = current_stream(device_).native_handle();
      amax_on_device(part, scales_, amaxes, stream);
      factors_on_device(recipe_, amaxes, scales_.count, factors, factors + scales_.count, stream);
      quantize_on_device(part, recipe_, factors, into, stream);
    }
  }

 private:
  const WeightRecipe recipe_;
  const c10::Device device_;
  const at::Tensor numbers_;
  const SharedScales scales_;
  const at::Tensor amaxes_;
  const at::Tensor factors_;  // and scales
  const at::Tensor codes_;
  const at::Tensor counts_;
};

}  // namespace

std::vector<MeasuredWork> code_works(const WorkPlace& place, const WorkSizes& sizes) {
  if (sizes.code_widths.empty()) return {};
  const std::vector<int64_t>& elements = sizes.elements;
  const auto of_rows = [&](const char* name, const auto& function) {
    return pass_work(name, elements, [=](int64_t n) -> std::function<void()> {
      const at::Tensor numbers = some_numbers(rows_of(n), place);
      return [=] { function(numbers); };
    });
  };
  constexpr WeightRecipe kRecipe = WeightRecipe::kFp8Row;
  return {of_rows("codes of rows",
                  [](const at::Tensor& x) { nn::quantize_rows(x, nn::ScaleBlock::kRow); }),
          of_rows("codes of rows and columns",
                  [](const at::Tensor& x) {
                    nn::quantize_two_forms({{x, {}}}, nn::ScaleBlock::kRow);
                  }),
          pass_work(
              "codes transposed", elements,
              [=](int64_t n) -> std::function<void()> {
                const at::Tensor codes =
                    nn::quantize_rows(some_numbers(rows_of(n), place), nn::ScaleBlock::kRow).codes;
                return [=] { nn::transposed_codes(codes); };
              }),
          pass_work(concat("codes of weights ", row_of(kRecipe).name), elements,
                    [=](int64_t n) -> std::function<void()> {
                      const QuantizedMatrix matrix(kRecipe, n, place);
                      return [=] { matrix.quantize(); };
                    })};
}

}  // namespace fsdp::train
