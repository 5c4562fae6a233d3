#include "fsdp/nn/layers/experts.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/grouped_linear.h"

namespace fsdp::nn {

ExpertBankImpl::ExpertBankImpl(const ExpertsOptions& o)
    : options_(o),
      gate_up_proj_(register_parameter(
          "gate_up_proj",
          at::empty({o.router.num_experts * 2 * o.intermediate_size, o.router.hidden_size}))),
      down_proj_(register_parameter(
          "down_proj",
          at::empty({o.router.num_experts * o.router.hidden_size, o.intermediate_size}))) {}

void ExpertBankImpl::reset_parameters() {
  fill_normal(gate_up_proj_, "gate_up_proj", options_.router.standard_deviation);
  fill_normal(down_proj_, "down_proj", options_.router.standard_deviation);
}

void ExpertBankImpl::join(const MeshAxis& ep) {
  const int64_t num_experts = options_.router.num_experts;
  if (num_experts % ep.size() != 0)
    throw UsageError(concat("a layer has ", num_experts, " experts for ep = ", ep.size(),
                            " ranks; ep must divide the number of experts"));
  ep_ = &ep;
}

ExpertBankImpl::Results ExpertBankImpl::forward(const at::Tensor& tokens,
                                                const SortedChoices& choices) {
  const auto route = c10::make_intrusive<ExpertRoute>(
      choices, ExpertRanks{.ep = ep_, .capacity_factor = options_.capacity_factor});
  const at::Tensor rows = dispatch(tokens, route);
  const RowGroups groups = row_groups(rows, route->ends(), {rows.size(1), down_proj_.size(1)});
  const at::Tensor inner = gated_silu(grouped_linear(rows, gate_up_proj_, groups));
  return {collect(grouped_linear(inner, down_proj_, groups), route), route->dropped()};
}

ExpertsImpl::ExpertsImpl(const ExpertsOptions& o)
    : gate_(register_module("gate", Router(o.router))),
      experts_(register_module("experts", ExpertBank(o))) {
  if (o.shared_size > 0)
    shared_expert_ = register_module(
        "shared_expert", GatedMlp(GatedMlpOptions{o.router.hidden_size, o.shared_size, false,
                                                  o.router.standard_deviation}));
}

RoutedTokens ExpertsImpl::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  RoutedChoices routed = gate_(tokens);
  const ExpertBankImpl::Results results = experts_(tokens, routed.choices);
  routed.load.dropped = results.dropped;
  at::Tensor mixed = weighted_sum(results.by_choice, routed.weight);
  if (!shared_expert_.is_empty()) mixed = mixed + shared_expert_(tokens);
  return {mixed.view(x.sizes()), std::move(routed.load)};
}

}  // namespace fsdp::nn
