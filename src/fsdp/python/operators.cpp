// Parts of language models as operators of torch, torch.ops.fsdp_cpp: norms, rotary positions,
// gated activations, and a loss without logits. Each has a schema, a formula for autograd that
// calls operators alone, and shapes without numbers, so that torch.compile() traces through it;
// python/fsdp_cpp/kernels.py puts them in place of modules.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/head_loss.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/rotary.h"

namespace fsdp {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<Tensor, Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename Function>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

Tensor dense_like(const Tensor& tensor) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

void refuse_second_derivatives(const char* name) {
  if (at::GradMode::is_enabled())
    throw UsageError(concat("fsdp_cpp::", name,
                            " has no second derivatives; call backward() without create_graph"));
}

// --- norms ---------------------------------------------------------------------------------------

TwoTensors rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset) {
  if (weight.dim() != 1 || x.dim() < 1 || weight.size(0) != x.size(-1))
    throw UsageError(concat("rms_norm() got a weight of ", weight.sizes(), " for an input of ",
                            x.sizes(), "; it needs one value for each of the last dimension"));
  const nn::NormedRows rows = nn::normed_rows(x, weight, {eps, offset});
  return {rows.normed.contiguous(), rows.scales};
}

TwoTensors rms_norm_shapes(const Tensor& x, const Tensor& /*weight*/, double /*eps*/,
                           double /*offset*/) {
  return {dense_like(x),
          at::empty_symint({x.sym_numel() / x.sym_size(-1)}, x.options().dtype(at::kFloat))};
}

TwoTensors rms_norm_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight,
                             const Tensor& scales, double eps, double offset) {
  const nn::NormedRowsGradients of =
      nn::normed_rows_backward(gradient, x, weight, scales, {eps, offset});
  return {of.of_x.contiguous(), of.of_weight};
}

TwoTensors rms_norm_backward_shapes(const Tensor& /*gradient*/, const Tensor& x,
                                    const Tensor& weight, const Tensor& /*scales*/, double /*eps*/,
                                    double /*offset*/) {
  return {dense_like(x), dense_like(weight)};
}

class RmsNorm final : public torch::autograd::Function<RmsNorm> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                               double eps, double offset) {
    static const auto op = operator_named<decltype(rms_norm)>("fsdp_cpp::rms_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [normed, scales] = op.call(x, weight, eps, offset);
    context->save_for_backward({x, weight, scales});
    context->saved_data["eps"] = eps;
    context->saved_data["offset"] = offset;
    context->mark_non_differentiable({scales});
    return {normed, scales};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op =
        operator_named<decltype(rms_norm_backward)>("fsdp_cpp::rms_norm_backward");
    refuse_second_derivatives("rms_norm");
    const variable_list saved = context->get_saved_variables();
    auto [of_x, of_weight] =
        op.call(gradients[0], saved[0], saved[1], saved[2], context->saved_data["eps"].toDouble(),
                context->saved_data["offset"].toDouble());
    return {of_x, of_weight, Tensor(), Tensor()};
  }
};

TwoTensors rms_norm_with_gradient(const Tensor& x, const Tensor& weight, double eps,
                                  double offset) {
  const variable_list result = RmsNorm::apply(x, weight, eps, offset);
  return {result[0], result[1]};
}

// --- rotary positions ----------------------------------------------------------------------------

// [batch, sequence, heads, channels] beside tables of [sequence, channels / 2], or such a table for
// each of the batch.
bool fit_tables(const Tensor& heads, const Tensor& cosine, const Tensor& sine) {
  return heads.dim() == 4 && cosine.sizes() == sine.sizes() && cosine.dim() >= 2 &&
         cosine.dim() <= 3 && (cosine.dim() == 2 || cosine.size(0) == heads.size(0)) &&
         cosine.size(-2) == heads.size(1) && 2 * cosine.size(-1) == heads.size(3) &&
         cosine.scalar_type() == at::kFloat && sine.scalar_type() == at::kFloat;
}

TwoTensors rotate(const Tensor& query, const Tensor& key, const Tensor& cosine, const Tensor& sine,
                  bool back) {
  if (!fit_tables(query, cosine, sine) || !fit_tables(key, cosine, sine))
    throw UsageError(concat("rotate() got heads of ", query.sizes(), " and ", key.sizes(),
                            " and fp32 tables of ", cosine.sizes(), " and ", sine.sizes(),
                            "; it needs half as many angles as channels for each position"));
  const nn::QueryAndKey result =
      nn::rotated({query, key}, {cosine, sine},
                  back ? nn::RotationDirection::kBack : nn::RotationDirection::kForward);
  return {result.query, result.key};
}

TwoTensors rotate_shapes(const Tensor& query, const Tensor& key, const Tensor& /*cosine*/,
                         const Tensor& /*sine*/, bool /*back*/) {
  return {dense_like(query), dense_like(key)};
}

class Rotate final : public torch::autograd::Function<Rotate> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& query, const Tensor& key,
                               const Tensor& cosine, const Tensor& sine, bool back) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({cosine, sine});
    context->saved_data["back"] = back;
    auto [rotated_query, rotated_key] = the_operator().call(query, key, cosine, sine, back);
    return {rotated_query, rotated_key};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    auto [of_query, of_key] = the_operator().call(gradients[0], gradients[1], saved[0], saved[1],
                                                  !context->saved_data["back"].toBool());
    return {of_query, of_key, Tensor(), Tensor(), Tensor()};
  }

 private:
  static const c10::TypedOperatorHandle<decltype(rotate)>& the_operator() {
    static const auto op = operator_named<decltype(rotate)>("fsdp_cpp::rotate");
    return op;
  }
};

TwoTensors rotate_with_gradient(const Tensor& query, const Tensor& key, const Tensor& cosine,
                                const Tensor& sine, bool back) {
  const variable_list result = Rotate::apply(query, key, cosine, sine, back);
  return {result[0], result[1]};
}

// --- gated activations ---------------------------------------------------------------------------

nn::GatedInput gated_input(const Tensor& first, const std::optional<Tensor>& second,
                           std::string_view activation) {
  constexpr std::array kNames = {std::pair("silu", nn::GatedActivation::kSilu),
                                 std::pair("gelu", nn::GatedActivation::kGelu),
                                 std::pair("gelu_tanh", nn::GatedActivation::kGeluTanh)};
  const auto* const found = std::find_if(
      kNames.begin(), kNames.end(), [&](const auto& each) { return each.first == activation; });
  if (found == kNames.end())
    throw UsageError(
        concat("activation is '", activation, "'; it must be silu, gelu or gelu_tanh"));
  return {found->second, first, second.value_or(Tensor())};
}

Tensor gated(const Tensor& first, const std::optional<Tensor>& second,
             std::string_view activation) {
  return nn::gated(gated_input(first, second, activation)).contiguous();
}

Tensor gated_shapes(const Tensor& first, const std::optional<Tensor>& second,
                    std::string_view /*activation*/) {
  if (second) return dense_like(first);
  c10::SymDimVector sizes(first.sym_sizes());
  sizes.back() = sizes.back() / 2;
  return at::empty_symint(sizes, first.options());
}

std::vector<Tensor> gated_backward(const Tensor& gradient, const Tensor& first,
                                   const std::optional<Tensor>& second,
                                   std::string_view activation) {
  const auto [of_first, of_second] =
      nn::gated_backward(gated_input(first, second, activation), gradient);
  if (!second) return {of_first.contiguous()};
  return {of_first.contiguous(), of_second.contiguous()};
}

std::vector<Tensor> gated_backward_shapes(const Tensor& /*gradient*/, const Tensor& first,
                                          const std::optional<Tensor>& second,
                                          std::string_view /*activation*/) {
  if (!second) return {dense_like(first)};
  return {dense_like(first), dense_like(*second)};
}

class Gated final : public torch::autograd::Function<Gated> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& first,
                        const std::optional<Tensor>& second, std::string_view activation) {
    static const auto op = operator_named<decltype(gated)>("fsdp_cpp::gated");
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({first, second.value_or(Tensor())});
    context->saved_data["activation"] = std::string(activation);
    return op.call(first, second, activation);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = operator_named<decltype(gated_backward)>("fsdp_cpp::gated_backward");
    const variable_list saved = context->get_saved_variables();
    const bool has_two = saved[1].defined();
    const std::vector<Tensor> of =
        op.call(gradients[0], saved[0], has_two ? std::optional(saved[1]) : std::nullopt,
                context->saved_data["activation"].toStringView());
    return {of[0], has_two ? of[1] : Tensor(), Tensor()};
  }
};

Tensor gated_with_gradient(const Tensor& first, const std::optional<Tensor>& second,
                           std::string_view activation) {
  return Gated::apply(first, second, activation);
}

// --- a head's loss without logits ----------------------------------------------------------------

// The loss, the factor that makes gradients of the sum those of the mean, and those gradients;
// without numbers where they are not wanted.
FourTensors linear_cross_entropy_parts(const Tensor& hidden, const Tensor& weight,
                                       const Tensor& targets, int64_t logit_bytes, double soft_cap,
                                       bool of_hidden, bool of_weight) {
  const nn::HeadLossParts parts = nn::head_loss_parts(
      hidden, weight, targets, {.logit_bytes = logit_bytes, .soft_cap = soft_cap},
      {of_hidden, of_weight});
  const Tensor none = at::empty({0}, hidden.options());
  return {parts.mean.loss, parts.mean.weight, of_hidden ? parts.hidden_gradient.contiguous() : none,
          of_weight ? parts.weight_gradient.contiguous() : none};
}

FourTensors linear_cross_entropy_parts_shapes(const Tensor& hidden, const Tensor& weight,
                                              const Tensor& /*targets*/, int64_t /*logit_bytes*/,
                                              double /*soft_cap*/, bool of_hidden, bool of_weight) {
  const Tensor none = at::empty({0}, hidden.options());
  const auto wide = hidden.options().dtype(at::kFloat);
  const at::ScalarType sums = at::promote_types(weight.scalar_type(), at::kFloat);
  return {at::empty({}, wide), at::empty({}, wide), of_hidden ? dense_like(hidden) : none,
          of_weight ? at::empty_symint(weight.sym_sizes(), wide.dtype(sums)) : none};
}

FourTensors parts_of(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                     int64_t logit_bytes, double soft_cap, bool of_hidden, bool of_weight) {
  static const auto op =
      operator_named<decltype(linear_cross_entropy_parts)>("fsdp_cpp::linear_cross_entropy_parts");
  return op.call(hidden, weight, targets, logit_bytes, soft_cap, of_hidden, of_weight);
}

class LinearCrossEntropy final : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& hidden, const Tensor& weight,
                        const Tensor& targets, int64_t logit_bytes, double soft_cap) {
    const bool of_hidden = hidden.requires_grad();
    const bool of_weight = weight.requires_grad();
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [loss, factor, hidden_gradient, weight_gradient] =
        parts_of(hidden, weight, targets, logit_bytes, soft_cap, of_hidden, of_weight);
    context->save_for_backward({factor, hidden_gradient, weight_gradient});
    context->saved_data["of_hidden"] = of_hidden;
    context->saved_data["of_weight"] = of_weight;
    context->saved_data["type"] = static_cast<int64_t>(weight.scalar_type());
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivatives("linear_cross_entropy");
    const variable_list saved = context->get_saved_variables();
    // A dim, so that products with it are computed in fp32 whatever the other's type.
    const Tensor factor = (saved[0] * gradients[0]).view({1});
    variable_list result(5);
    if (context->saved_data["of_hidden"].toBool())
      result[0] = saved[1].to(at::kFloat).mul(factor).to(saved[1].scalar_type());
    if (context->saved_data["of_weight"].toBool())
      result[1] =
          saved[2].mul(factor).to(static_cast<at::ScalarType>(context->saved_data["type"].toInt()));
    return result;
  }
};

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                            int64_t logit_bytes, double soft_cap) {
  return std::get<0>(parts_of(hidden, weight, targets, logit_bytes, soft_cap, /*of_hidden=*/false,
                              /*of_weight=*/false));
}

Tensor linear_cross_entropy_with_gradient(const Tensor& hidden, const Tensor& weight,
                                          const Tensor& targets, int64_t logit_bytes,
                                          double soft_cap) {
  if (at::GradMode::is_enabled() && (hidden.requires_grad() || weight.requires_grad()))
    return LinearCrossEntropy::apply(hidden, weight, targets, logit_bytes, soft_cap);
  const at::AutoDispatchBelowADInplaceOrView below;
  return linear_cross_entropy(hidden, weight, targets, logit_bytes, soft_cap);
}

}  // namespace

TORCH_LIBRARY(fsdp_cpp, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)");
  library.def(
      "rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor scales, float eps, "
      "float offset) -> (Tensor, Tensor)");
  library.def(
      "rotate(Tensor query, Tensor key, Tensor cosine, Tensor sine, bool back) -> (Tensor, "
      "Tensor)");
  library.def("gated(Tensor first, Tensor? second, str activation) -> Tensor");
  library.def(
      "gated_backward(Tensor gradient, Tensor first, Tensor? second, str activation) -> Tensor[]");
  library.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int logit_bytes, float "
      "soft_cap) -> Tensor");
  library.def(
      "linear_cross_entropy_parts(Tensor hidden, Tensor weight, Tensor targets, int logit_bytes, "
      "float soft_cap, bool of_hidden, bool of_weight) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(fsdp_cpp, CompositeExplicitAutograd, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("rms_norm_backward", rms_norm_backward);
  library.impl("rotate", rotate);
  library.impl("gated", gated);
  library.impl("gated_backward", gated_backward);
  library.impl("linear_cross_entropy", linear_cross_entropy);
  library.impl("linear_cross_entropy_parts", linear_cross_entropy_parts);
}

TORCH_LIBRARY_IMPL(fsdp_cpp, Meta, library) {
  library.impl("rms_norm", rms_norm_shapes);
  library.impl("rms_norm_backward", rms_norm_backward_shapes);
  library.impl("rotate", rotate_shapes);
  library.impl("gated", gated_shapes);
  library.impl("gated_backward", gated_backward_shapes);
  library.impl("linear_cross_entropy_parts", linear_cross_entropy_parts_shapes);
}

TORCH_LIBRARY_IMPL(fsdp_cpp, Autograd, library) {
  library.impl("rms_norm", rms_norm_with_gradient);
  library.impl("rotate", rotate_with_gradient);
  library.impl("gated", gated_with_gradient);
  library.impl("linear_cross_entropy", linear_cross_entropy_with_gradient);
}

}  // namespace fsdp
