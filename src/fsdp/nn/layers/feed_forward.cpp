#include "fsdp/nn/layers/feed_forward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/modulelist.h>

#include <string>
#include <utility>

#include "fsdp/nn/kernels/kernel_calls.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool have_kernels(const at::Tensor& gate, const at::Tensor& up) {
  return has_kernels(gate) && up.scalar_type() == gate.scalar_type() && up.sizes() == gate.sizes();
}

GatedSiluMemory memory_of(const at::Tensor& gate, const at::Tensor& up) {
  return {.dtype = dtype_of(gate.scalar_type()),
          .numel = gate.numel(),
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr()};
}

class GatedSilu final : public torch::autograd::Function<GatedSilu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate_in,
                            const at::Tensor& up_in) {
    if (!have_kernels(gate_in, up_in)) {
      context->save_for_backward({gate_in, up_in});
      return at::silu(gate_in).mul_(up_in);
    }
    const at::Tensor gate = gate_in.contiguous();
    const at::Tensor up = up_in.contiguous();
    context->save_for_backward({gate, up});
    at::Tensor result = at::empty_like(gate);
    const OnDeviceOf on_device(gate);
    gated_silu_on_device(memory_of(gate, up), result.mutable_data_ptr(), on_device.stream());
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    if (have_kernels(saved[0], saved[1])) return by_kernel(saved[0], saved[1], gradients[0]);
    return {at::silu_backward(gradients[0] * saved[1], saved[0]),
            at::silu(saved[0]).mul_(gradients[0])};
  }

 private:
  static variable_list by_kernel(const at::Tensor& gate, const at::Tensor& up,
                                 const at::Tensor& gradient_in) {
    const at::Tensor gradient = gradient_in.contiguous();
    at::Tensor gate_gradient = at::empty_like(gate);
    at::Tensor up_gradient = at::empty_like(up);
    const OnDeviceOf on_device(gate);
    gated_silu_backward_on_device(memory_of(gate, up), gradient.const_data_ptr(),
                                  gate_gradient.mutable_data_ptr(), up_gradient.mutable_data_ptr(),
                                  on_device.stream());
    return {gate_gradient, up_gradient};
  }
};

Projection projection(int64_t in, int64_t out, double deviation) {
  return Projection(ProjectionOptions{.in = in, .out = out, .standard_deviation = deviation});
}

// Tokens times choices, sorted by expert: sorted row r is choice order[r].
struct Assignment {
  at::Tensor order;
  at::Tensor inverse;
  std::vector<int64_t> counts;  // sorted rows per expert, on the host
};

Assignment assign(const at::Tensor& chosen, const at::Tensor& counts) {
  Assignment assignment;
  const at::Tensor flat = chosen.reshape({-1});
  assignment.order = at::argsort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  assignment.inverse = at::empty_like(assignment.order);
  assignment.inverse.scatter_(0, assignment.order,
                              at::arange(flat.size(0), assignment.order.options()));
  // The only values that the host needs: how many rows each expert multiplies.
  const at::Tensor on_host = counts.to(at::kCPU);
  const auto* first = on_host.const_data_ptr<int64_t>();
  assignment.counts.assign(first, first + on_host.numel());
  return assignment;
}

// Each token once per choice, sorted by expert. Gathers rows in both directions and never scatters
// them, so that sums have one order on every device.
class Dispatch final : public torch::autograd::Function<Dispatch> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tokens,
                            const at::Tensor& order, const at::Tensor& inverse,
                            int64_t num_chosen) {
    context->save_for_backward({inverse});
    context->saved_data["num_chosen"] = num_chosen;
    return tokens.index_select(0, order.div(num_chosen, "floor"));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor inverse = context->get_saved_variables()[0];
    const int64_t num_chosen = context->saved_data["num_chosen"].toInt();
    const at::Tensor rows = gradients[0].index_select(0, inverse);
    return {rows.view({-1, num_chosen, rows.size(1)}).sum(1), at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

// Back to the order of tokens and choices.
class Undispatch final : public torch::autograd::Function<Undispatch> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& order, const at::Tensor& inverse) {
    context->save_for_backward({order});
    return rows.index_select(0, inverse);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {gradients[0].index_select(0, context->get_saved_variables()[0]), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up) {
  return GatedSilu::apply(gate, up);
}

GatedMlpImpl::GatedMlpImpl(const GatedMlpOptions& o)
    : gate_proj_(register_module(
          "gate_proj", Projection(ProjectionOptions{o.hidden_size, o.intermediate_size, o.bias,
                                                    o.standard_deviation}))),
      up_proj_(register_module(
          "up_proj", Projection(ProjectionOptions{o.hidden_size, o.intermediate_size, o.bias,
                                                  o.standard_deviation}))),
      down_proj_(register_module(
          "down_proj", Projection(ProjectionOptions{o.intermediate_size, o.hidden_size, o.bias,
                                                    o.standard_deviation}))) {}

at::Tensor GatedMlpImpl::forward(const at::Tensor& x) {
  const std::vector<at::Tensor> projected = project(x, {gate_proj_, up_proj_});
  return down_proj_(gated_silu(projected[0], projected[1]));
}

ExpertImpl::ExpertImpl(const ExpertsOptions& o)
    : w1_(register_module("w1",
                          projection(o.hidden_size, o.intermediate_size, o.standard_deviation))),
      w2_(register_module("w2",
                          projection(o.intermediate_size, o.hidden_size, o.standard_deviation))),
      w3_(register_module("w3",
                          projection(o.hidden_size, o.intermediate_size, o.standard_deviation))) {}

at::Tensor ExpertImpl::forward(const at::Tensor& x) {
  const std::vector<at::Tensor> projected = project(x, {w1_, w3_});
  return w2_(gated_silu(projected[0], projected[1]));
}

ExpertsImpl::ExpertsImpl(const ExpertsOptions& o)
    : options_(o),
      gate_(
          register_module("gate", projection(o.hidden_size, o.num_experts, o.standard_deviation))) {
  torch::nn::ModuleList list;
  for (int64_t i = 0; i < o.num_experts; ++i) {
    experts_.emplace_back(o);
    list->push_back(experts_.back());
  }
  register_module("experts", list);
  if (o.shared_size > 0)
    shared_expert_ = register_module(
        "shared_expert",
        GatedMlp(GatedMlpOptions{o.hidden_size, o.shared_size, false, o.standard_deviation}));
}

RoutedTokens ExpertsImpl::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.reshape({-1, options_.hidden_size});
  const at::Tensor probability = at::softmax(gate_(tokens), -1, at::kFloat);
  auto [weight, chosen] = probability.topk(options_.num_chosen, -1);
  weight = (weight / weight.sum(-1, true)).to(x.scalar_type());
  const at::Tensor counts = at::bincount(chosen.reshape({-1}), {}, options_.num_experts);

  const Assignment to = assign(chosen, counts);
  const at::Tensor rows = Dispatch::apply(tokens, to.order, to.inverse, options_.num_chosen);
  const std::vector<at::Tensor> parts = rows.split_with_sizes(to.counts);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < experts_.size(); ++i)
    if (to.counts[i] > 0) outputs.push_back(experts_[i](parts[i]));
  const at::Tensor by_choice = Undispatch::apply(at::cat(outputs), to.order, to.inverse)
                                   .view({-1, options_.num_chosen, options_.hidden_size});
  at::Tensor mixed = at::bmm(weight.unsqueeze(1), by_choice).squeeze(1);
  if (!shared_expert_.is_empty()) mixed = mixed + shared_expert_(tokens);

  return {mixed.view(x.sizes()),
          {probability.mean(0), counts.to(at::kFloat).div_(static_cast<double>(tokens.size(0)))}};
}

at::Tensor load_balancing_loss(std::span<const RouterLoad> layers) {
  std::vector<at::Tensor> probabilities;
  std::vector<at::Tensor> shares;
  for (const RouterLoad& load : layers) {
    probabilities.push_back(load.mean_probability);
    shares.push_back(load.share);
  }
  const at::Tensor probability = at::stack(probabilities).mean(0);
  const at::Tensor share = at::stack(shares).mean(0);
  return probability.dot(share) * probability.size(0);
}

}  // namespace fsdp::nn
