#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/text.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/nn/layers/attention.h"
#include "fsdp/nn/layers/code_products.h"
#include "fsdp/nn/layers/quantized_rows.h"
#include "fsdp/nn/layers/weight_gradient.h"
#include "fsdp/train/calibration/call_timer.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

namespace {

using Sizes = std::span<const int64_t>;
using Call = std::function<void()>;
// What a product of [tokens, in], [out, in] and [tokens, out] reads.
using Operands = std::function<Call(const at::Tensor& x, const at::Tensor& w, const at::Tensor& g)>;

at::ScalarType gradient_type(const WorkPlace& place) {
  return place.device.is_cpu() ? place.dtype : at::kFloat;
}

at::Tensor result_of(int64_t rows, int64_t columns, const at::Tensor& like, at::ScalarType type) {
  return at::empty({rows, columns}, like.options().dtype(type));
}

Call forward_product(const at::Tensor& x, const at::Tensor& w, const at::Tensor&) {
  at::Tensor to = result_of(x.size(0), w.size(0), x, x.scalar_type());
  return [=]() mutable { at::mm_out(to, x, w.t()); };
}

Call input_product(const at::Tensor&, const at::Tensor& w, const at::Tensor& g) {
  at::Tensor to = result_of(g.size(0), w.size(1), g, g.scalar_type());
  return [=]() mutable { at::mm_out(to, g, w); };
}

struct Form {
  const char* name;
  Operands operands;
};

std::vector<MeasuredWork> works_of(const std::string& type, const WorkPlace& place,
                                   const std::vector<std::vector<int64_t>>& points,
                                   const std::vector<Form>& forms) {
  std::vector<MeasuredWork> works;
  for (const Form& form : forms)
    works.push_back({.name = concat("product ", type, " ", form.name),
                     .axes = {"tokens", "out", "in"},
                     .points = points,
                     .prepare = [place, operands = form.operands](Sizes sizes) {
                       return operands(some_numbers({sizes[0], sizes[2]}, place),
                                       some_numbers({sizes[1], sizes[2]}, place),
                                       some_numbers({sizes[0], sizes[1]}, place));
                     }});
  return works;
}

std::vector<MeasuredWork> plain_products(const WorkPlace& place, const WorkSizes& sizes) {
  std::vector<int64_t> out = sizes.widths;
  if (sizes.head_width > 0) out.push_back(sizes.head_width);
  const auto weight_product = [type = gradient_type(place)](const at::Tensor& x, const at::Tensor&,
                                                            const at::Tensor& g) {
    const at::Tensor to = result_of(g.size(1), x.size(1), x, type);
    return [=] { nn::write_product(to, g.t(), x, nn::ProductUse::kStored); };
  };
  return works_of(std::string(name_of(dtype_of(place.dtype))), place,
                  {sizes.tokens, out, sizes.widths},
                  {{"forward", forward_product},
                   {"input gradient", input_product},
                   {"weight gradient", weight_product}});
}

// All have the form of a forward: rows of codes times rows of codes.
Call code_product(const at::Tensor& a, const at::Tensor& b, at::ScalarType type,
                  nn::CodeSums sums) {
  const auto codes = [](const at::Tensor& numbers) {
    return nn::quantize_rows(numbers.contiguous(), nn::ScaleBlock::kRow);
  };
  const at::Tensor to = result_of(a.size(0), b.size(0), a, type);
  return [to, rows = codes(a), columns = codes(b), sums] {
    nn::multiply_codes(to, {.a = rows, .b = columns, .sums = sums});
  };
}

std::vector<MeasuredWork> code_products(const WorkPlace& place, const WorkSizes& sizes) {
  if (sizes.code_widths.empty()) return {};
  const at::ScalarType narrow = place.dtype;
  return works_of(
      "fp8-row", place, {sizes.code_tokens, sizes.code_widths, sizes.code_widths},
      {{"forward",
        [=](const at::Tensor& x, const at::Tensor& w, const at::Tensor&) {
          return code_product(x, w, narrow, nn::CodeSums::kFast);
        }},
       {"input gradient",
        [=](const at::Tensor&, const at::Tensor& w, const at::Tensor& g) {
          return code_product(g, w.t(), narrow, nn::CodeSums::kExact);
        }},
       {"weight gradient", [=](const at::Tensor& x, const at::Tensor&, const at::Tensor& g) {
          return code_product(g.t(), x.t(), at::kFloat, nn::CodeSums::kExact);
        }}});
}

// [1, rows, sequence, head_dim]; keys and values have one head for `group` of queries.
std::vector<at::Tensor> heads_of(Sizes sizes, const WorkPlace& place) {
  const int64_t keys = std::max<int64_t>(1, sizes[0] / sizes[3]);
  std::vector<at::Tensor> heads;
  for (const int64_t rows : {keys * sizes[3], keys, keys})
    // As projections give them: positions are further apart than heads.
    heads.push_back(some_numbers({1, sizes[1], rows, sizes[2]}, place).transpose(1, 2));
  return heads;
}

}  // namespace

at::Tensor some_numbers(at::IntArrayRef shape, const WorkPlace& place) {
  constexpr double kAngle = 0.7;
  return at::arange(c10::multiply_integers(shape), at::device(place.device).dtype(at::kFloat))
      .mul_(kAngle)
      .sin_()
      .to(place.dtype)
      .view(shape);
}

at::Tensor some_tokens(int64_t count, int64_t vocabulary, const WorkPlace& place) {
  constexpr int64_t kStride = 7919;  // a prime
  return at::arange(count, at::device(place.device).dtype(at::kLong))
      .mul_(kStride)
      .remainder_(vocabulary);
}

std::vector<MeasuredWork> product_works(const WorkPlace& place, const WorkSizes& sizes) {
  std::vector<MeasuredWork> works = plain_products(place, sizes);
  for (MeasuredWork& work : code_products(place, sizes)) works.push_back(std::move(work));
  return works;
}

std::vector<MeasuredWork> attention_works(const WorkPlace& place, const WorkSizes& sizes) {
  const auto attention = [](const std::vector<at::Tensor>& x) {
    return std::vector<at::Tensor>{nn::causal_attention(x[0], x[1], x[2])};
  };
  const auto work = [&](const char* direction, const auto& call_of) {
    return MeasuredWork{
        .name = concat("attention ", name_of(dtype_of(place.dtype)), " ", direction),
        .axes = {"rows", "sequence", "head_dim", "group"},
        .points = {sizes.attention_rows, sizes.sequences, sizes.head_dims, {1, 4}},
        .prepare = [=](Sizes s) { return call_of(heads_of(s, place)); }};
  };
  return {work("forward", [=](const auto& heads) { return forward_call(attention, heads); }),
          work("backward", [=](const auto& heads) { return backward_call(attention, heads); })};
}

}  // namespace fsdp::train
