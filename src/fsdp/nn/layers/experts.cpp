#include "fsdp/nn/layers/experts.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/grouped_linear.h"

namespace fsdp::nn {

namespace {

// The matrices through which tokens go into an expert, one parameter of all experts.
struct IntoExperts {
  const char* name;
  int64_t num_matrices;
  at::Tensor (*activation)(const at::Tensor& rows);
};

const IntoExperts& into_experts(MlpKind kind) {
  static constexpr IntoExperts kGated{"gate_up_proj", 2, gated_silu};
  static constexpr IntoExperts kSquared{"up_proj", 1, squared_relu};
  return kind == MlpKind::kGatedSilu ? kGated : kSquared;
}

int64_t token_size(const ExpertsOptions& o) {
  return o.latent_size > 0 ? o.latent_size : o.router.hidden_size;
}

}  // namespace

ExpertBankImpl::ExpertBankImpl(const ExpertsOptions& o)
    : options_(o),
      into_(register_parameter(
          into_experts(o.kind).name,
          at::empty({o.router.num_experts * into_experts(o.kind).num_matrices * o.intermediate_size,
                     token_size(o)}))),
      down_proj_(register_parameter(
          "down_proj", at::empty({o.router.num_experts * token_size(o), o.intermediate_size}))) {}

void ExpertBankImpl::reset_parameters() {
  fill_normal(into_, into_experts(options_.kind).name, options_.router.standard_deviation);
  fill_normal(down_proj_, "down_proj", options_.router.standard_deviation);
}

std::vector<int64_t> ExpertBankImpl::matrix_rows(const std::string& parameter) const {
  if (parameter != "down_proj") return {options_.intermediate_size};
  return {token_size(options_)};
}

void ExpertBankImpl::join(const MeshAxis& ep) {
  const int64_t num_experts = options_.router.num_experts;
  if (num_experts % ep.size() != 0)
    throw UsageError(concat("a layer has ", num_experts, " experts for ep = ", ep.size(),
                            " ranks; ep must divide the number of experts"));
  ep_ = &ep;
}

ExpertBankImpl::Results ExpertBankImpl::forward(const at::Tensor& tokens,
                                                const SortedChoices& choices,
                                                const at::Tensor& weight) {
  const auto route = c10::make_intrusive<ExpertRoute>(
      choices, ExpertRanks{.ep = ep_, .capacity_factor = options_.capacity_factor});
  const at::Tensor rows = dispatch(tokens, route);
  const RowGroups groups = row_groups(rows, route->ends(), {rows.size(1), down_proj_.size(1)});
  const at::Tensor inner =
      into_experts(options_.kind).activation(grouped_linear(rows, into_, groups));
  return {combine(grouped_linear(inner, down_proj_, groups), weight, route), route->dropped()};
}

ExpertsImpl::ExpertsImpl(const ExpertsOptions& o)
    : gate_(register_module("gate", Router(o.router))),
      experts_(register_module("experts", ExpertBank(o))) {
  const int64_t hidden = o.router.hidden_size;
  const double deviation = o.router.standard_deviation;
  if (o.latent_size > 0) {
    to_latent_ = register_module(
        "fc1_latent_proj", Projection(ProjectionOptions{hidden, o.latent_size, o.bias, deviation}));
    from_latent_ = register_module(
        "fc2_latent_proj", Projection(ProjectionOptions{o.latent_size, hidden, o.bias, deviation}));
  }
  if (o.shared_size > 0)
    shared_expert_ = register_module(
        o.shared_module, Mlp(MlpOptions{hidden, o.shared_size, o.kind, o.bias, deviation}));
  if (o.is_shared_gated)
    shared_expert_gate_ = register_module(
        "shared_expert_gate", Projection(ProjectionOptions{hidden, 1, false, deviation}));
}

at::Tensor ExpertsImpl::shared_output(const at::Tensor& tokens) {
  const at::Tensor output = shared_expert_(tokens);
  return shared_expert_gate_.is_empty() ? output
                                        : at::sigmoid(shared_expert_gate_(tokens)) * output;
}

RoutedTokens ExpertsImpl::forward(const at::Tensor& x, const at::Tensor& token_weight) {
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  RoutedChoices routed = gate_(tokens, token_weight);
  auto [mixed, dropped] =
      experts_(to_latent_.is_empty() ? tokens : to_latent_(tokens), routed.choices, routed.weight);
  routed.load.dropped = std::move(dropped);
  if (!from_latent_.is_empty()) mixed = from_latent_(mixed);
  if (!shared_expert_.is_empty()) mixed = mixed + shared_output(tokens);
  return {mixed.view(x.sizes()), std::move(routed.load)};
}

}  // namespace fsdp::nn
