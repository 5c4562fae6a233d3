#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/text.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/cross_entropy.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/rotary.h"
#include "fsdp/shard/group/pack_on_device.h"
#include "fsdp/train/calibration/call_timer.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

namespace {

using Tensors = std::vector<at::Tensor>;
using Call = std::function<void()>;
// From elements to a call.
using Prepare = std::function<Call(int64_t elements)>;

constexpr int64_t kWidth = 2048;
constexpr int64_t kHeadDim = 64;
constexpr int64_t kVocabulary = 32000;
constexpr double kEps = 1e-5;

std::vector<int64_t> rows_of_width(int64_t elements, int64_t width) {
  const int64_t columns = std::min(width, elements);
  return {elements / columns, columns};
}

// Both directions of a layer.
struct LayerPass {
  const char* name;
  TensorFunction function;
  std::function<Tensors(int64_t elements)> inputs;
};

std::vector<LayerPass> layer_passes(const WorkPlace& place) {
  const auto numbers = [place](at::IntArrayRef shape) { return some_numbers(shape, place); };
  const auto weight = [numbers](int64_t elements) { return numbers({rows_of(elements)[1]}); };
  const auto angles = std::make_shared<nn::Rotary>(LlamaConfig{
      .hidden_size = kWidth, .num_attention_heads = kWidth / kHeadDim, .head_dim = kHeadDim});
  return {
      {"norm", [](const Tensors& in) { return Tensors{nn::rms_norm(in[0], in[1], kEps)}; },
       [=](int64_t n) {
         return Tensors{numbers(rows_of(n)), weight(n)};
       }},
      {"sum and norm",
       [](const Tensors& in) {
         nn::RmsNorm norm(in[2].size(0), kEps);
         norm->weight = in[2];
         const nn::NormedBranch branch = norm->branch(in[0], in[1]);
         return Tensors{branch.around, branch.normed};
       },
       [=](int64_t n) {
         return Tensors{numbers(rows_of(n)), numbers(rows_of(n)), weight(n)};
       }},
      {"gated silu", [](const Tensors& in) { return Tensors{nn::gated_silu(in[0], in[1])}; },
       [=](int64_t n) {
         return Tensors{numbers(rows_of(n)), numbers(rows_of(n))};
       }},
      // Elements of queries and keys together.
      {"rotary",
       [=](const Tensors& in) {
         const nn::QueryAndKey turned =
             nn::rotate({in[0], in[1]}, angles->tables(0, in[0].size(1), place.device));
         return Tensors{turned.query, turned.key};
       },
       [=](int64_t n) {
         constexpr int64_t kHeads = 8;
         const int64_t positions = std::max<int64_t>(1, n / 2 / kHeads / kHeadDim);
         const at::Tensor heads = numbers({1, positions, kHeads, kHeadDim});
         return Tensors{heads, heads.clone()};
       }},
  };
}

Prepare cross_entropy_pass(const WorkPlace& place) {
  return [=](int64_t elements) -> Call {
    const at::Tensor logits = some_numbers(rows_of_width(elements, kVocabulary), place);
    const int64_t rows = logits.size(0);
    const at::Tensor targets = some_tokens(rows, logits.size(1), place);
    const at::Tensor sums =
        at::empty({nn::kRowSums, rows}, at::device(place.device).dtype(at::kFloat));
    return [=] {
      nn::cross_entropy_rows(
          nn::RowWork::kBoth,
          {.logits = logits, .targets = targets, .sums = sums, .vocabulary = logits.size(1)});
    };
  };
}

// Gradients of rows of a table, which autograd makes as large as the table.
MeasuredWork embedding_backward(const WorkPlace& place, const std::vector<int64_t>& elements) {
  return {.name = "embedding backward",
          .axes = {"elements", "table"},
          .points = {elements, elements},
          .prepare = [place](std::span<const int64_t> sizes) -> Call {
            const int64_t width = std::min({kWidth, sizes[0], sizes[1]});
            const at::Tensor gradient = some_numbers({sizes[0] / width, width}, place);
            const int64_t vocabulary = sizes[1] / width;
            const at::Tensor tokens = some_tokens(gradient.size(0), vocabulary, place);
            return [=] {
              at::embedding_dense_backward(gradient, tokens, vocabulary, /*padding_idx=*/-1,
                                           /*scale_grad_by_freq=*/false);
            };
          }};
}

// What autograd hands over goes to fp32 slabs, on a GPU by a kernel of the engine (HeldGradients).
Prepare widening_pass(const WorkPlace& place) {
  return [=](int64_t elements) -> Call {
    const at::Tensor source = some_numbers({elements}, place);
    const at::Tensor target = at::empty({elements}, source.options().dtype(at::kFloat));
    if (place.device.is_cpu()) return [=] { target.copy_(source); };
    return [=] {
      const PackedTensor gradient{.from = source.const_data_ptr(),
                                  .from_dtype = dtype_of(place.dtype),
                                  .to = target.mutable_data_ptr(),
                                  .numel = elements};
      pack_on_device({&gradient, 1}, DType::kFloat32, /*scale=*/1.0f,
                     current_stream(place.device).native_handle());
    };
  };
}

}  // namespace

std::vector<int64_t> rows_of(int64_t elements) { return rows_of_width(elements, kWidth); }

MeasuredWork pass_work(std::string name, const std::vector<int64_t>& elements,
                       const Prepare& prepare) {
  return {.name = std::move(name),
          .axes = {"elements"},
          .points = {elements},
          .prepare = [prepare](std::span<const int64_t> sizes) { return prepare(sizes[0]); }};
}

std::vector<MeasuredWork> pass_works(const WorkPlace& place, const WorkSizes& sizes) {
  const std::vector<int64_t>& elements = sizes.elements;
  std::vector<MeasuredWork> works;
  for (const LayerPass& layer : layer_passes(place)) {
    works.push_back(pass_work(concat(layer.name, " forward"), elements, [=](int64_t n) {
      return forward_call(layer.function, layer.inputs(n));
    }));
    works.push_back(pass_work(concat(layer.name, " backward"), elements, [=](int64_t n) {
      return backward_call(layer.function, layer.inputs(n));
    }));
  }
  works.push_back(pass_work("sum", elements, [=](int64_t n) -> Call {
    const at::Tensor a = some_numbers({n}, place);
    const at::Tensor b = some_numbers({n}, place);
    return [=] { at::add(a, b); };
  }));
  works.push_back(pass_work("sum of rows", elements, [=](int64_t n) -> Call {
    const at::Tensor rows = some_numbers(rows_of(n), place);
    return [=] { rows.sum(0); };
  }));
  works.push_back(pass_work("scaled to fp32", elements, [=](int64_t n) -> Call {
    const at::Tensor values = some_numbers({n}, place).to(at::kFloat);
    const at::Tensor factor = at::ones({1}, values.options());
    at::Tensor to = at::empty_like(values);
    return [=]() mutable { at::mul_out(to, values, factor); };
  }));
  works.push_back(pass_work("cross entropy", elements, cross_entropy_pass(place)));
  works.push_back(pass_work("embedding forward", elements, [=](int64_t n) -> Call {
    const at::Tensor table = some_numbers(rows_of(n), place);
    const at::Tensor tokens = some_tokens(table.size(0), table.size(0), place);
    return [=] { at::embedding(table, tokens); };
  }));
  works.push_back(embedding_backward(place, elements));
  works.push_back(pass_work("copy", elements, [=](int64_t n) -> Call {
    const at::Tensor source = some_numbers({n}, place);
    const at::Tensor target = at::empty_like(source);
    return [=] { target.copy_(source); };
  }));
  works.push_back(pass_work("copy to fp32", elements, widening_pass(place)));
  return works;
}

}  // namespace fsdp::train
