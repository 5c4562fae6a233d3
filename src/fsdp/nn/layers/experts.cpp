#include "fsdp/nn/layers/experts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/nn/layers/linear_functions.h"

namespace fsdp::nn {

// --- routers -------------------------------------------------------------------------------------

namespace {

at::Tensor counts_of(const SortedChoices& choices) {
  return at::diff(choices.ends, 1, 0, at::zeros({1}, choices.ends.options()));
}

// Places without a weight are no tokens of the batch.
at::Tensor counts_of_weighted(const at::Tensor& chosen, const at::Tensor& token_weight,
                              int64_t num_experts) {
  const at::Tensor is_token = token_weight.ne(0.0).to(at::kDouble).unsqueeze(1).expand_as(chosen);
  return at::zeros({num_experts}, is_token.options())
      .scatter_add_(0, chosen.flatten(), is_token.flatten());
}

// Tokens per expert / all tokens.
at::Tensor shares_of(const SortedChoices& choices) {
  return counts_of(choices).to(at::kFloat).div_(static_cast<double>(choices.chosen.size(0)));
}

// probability: [tokens, experts].
RouterLoad weighted_load(const at::Tensor& probability, const at::Tensor& chosen,
                         const at::Tensor& token_weight) {
  const at::Tensor weight = token_weight.unsqueeze(1);
  return {
      .mean_probability = (probability * weight).mean(0),
      .share = at::zeros_like(probability.detach()).scatter_(1, chosen, 1.0).mul_(weight).mean(0)};
}

}  // namespace

RouterImpl::RouterImpl(const RouterOptions& options)
    : options_(options),
      weight_(register_parameter("weight", at::empty({options.num_experts, options.hidden_size}))) {
  if (options.has_bias)
    bias_ = register_buffer("e_score_correction_bias", at::zeros({options.num_experts}));
}

void RouterImpl::reset_parameters() {
  fill_normal(weight_, "weight", options_.standard_deviation);
  if (bias_.defined()) bias_.zero_();
}

// A forward whose backward computes it again runs twice, once of them without gradients, as do
// forwards that train nothing.
void RouterImpl::count(const SortedChoices& choices, const at::Tensor& token_weight) {
  if (!bias_.defined() || !at::GradMode::is_enabled()) return;
  const at::Tensor counts =
      token_weight.defined()
          ? counts_of_weighted(choices.chosen, token_weight, options_.num_experts)
          : counts_of(choices).to(at::kDouble);
  if (num_chosen_.defined())
    num_chosen_.add_(counts);
  else
    num_chosen_ = counts;
}

void RouterImpl::update_bias(const at::Tensor& num_chosen) {
  const at::NoGradGuard no_grad;
  // Whole numbers, so that experts with exactly the mean keep their biases.
  const at::Tensor missing =
      num_chosen.sum() - num_chosen * static_cast<double>(options_.num_experts);
  bias_.add_(missing.sign().to(bias_.scalar_type()), options_.bias_rate);
  num_chosen_.zero_();
}

// The scores, and less than any score where a group is closed.
at::Tensor RouterImpl::among_open_groups(const at::Tensor& scores) const {
  if (options_.num_open_groups == options_.num_groups) return scores;
  const at::Tensor groups = scores.view({scores.size(0), options_.num_groups, -1});
  const int64_t num_best = std::min<int64_t>(2, groups.size(2));
  const at::Tensor best = std::get<0>(groups.topk(num_best, -1)).sum(-1);
  const at::Tensor open = std::get<1>(best.topk(options_.num_open_groups, -1));
  const at::Tensor closed = at::ones(best.sizes(), best.options().dtype(at::kBool))
                                .scatter_(1, open, at::zeros_like(open, at::kBool));
  return groups.masked_fill(closed.unsqueeze(-1), -std::numeric_limits<float>::infinity())
      .view(scores.sizes());
}

RoutedChoices RouterImpl::forward(const at::Tensor& tokens, const at::Tensor& token_weight) {
  const bool is_softmax = options_.score == RouterScore::kSoftmax;
  const at::Tensor scores =
      is_softmax ? at::softmax(nn::linear(tokens, weight_, at::Tensor()), -1, at::kFloat)
                 : at::sigmoid(nn::linear(tokens.to(at::kFloat), weight_.to(at::kFloat), {}));
  const at::Tensor preference = bias_.defined() ? scores.detach() + bias_ : scores.detach();
  const at::Tensor chosen =
      std::get<1>(among_open_groups(preference).topk(options_.num_chosen, -1));
  at::Tensor weight = scores.gather(1, chosen);
  // DeepSeek-V3's scores may all be 0; a softmax's are not.
  if (options_.normalizes)
    weight = weight / (is_softmax ? weight.sum(-1, true) : weight.sum(-1, true) + 1e-20);
  if (options_.scale != 1.0) weight = weight * options_.scale;

  RoutedChoices result{.weight = weight.to(tokens.scalar_type()),
                       .choices = sort_choices(chosen, options_.num_experts),
                       .load = {}};
  count(result.choices, token_weight);
  const at::Tensor probability = is_softmax ? scores : scores / scores.sum(-1, true);
  if (token_weight.defined())
    result.load = weighted_load(probability, chosen, token_weight);
  else
    result.load = {.mean_probability = probability.mean(0), .share = shares_of(result.choices)};
  return result;
}

// --- experts -------------------------------------------------------------------------------------

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

ExpertResults mixed_by_experts(const at::Tensor& tokens, const SortedChoices& choices,
                               const at::Tensor& weight, const ExpertMatrices& experts,
                               const ExpertRanks& ranks) {
  const auto route = c10::make_intrusive<ExpertRoute>(choices, weight, ranks);
  const at::Tensor rows = dispatch(tokens, route);
  const RowGroups groups = row_groups(rows, route->ends(), {rows.size(1), experts.down.size(1)});
  const at::Tensor inner = experts.activation(grouped_linear(rows, experts.into, groups));
  return {combine(grouped_linear(inner, experts.down, groups), weight, route), route->dropped()};
}

ExpertResults ExpertBankImpl::forward(const at::Tensor& tokens, const SortedChoices& choices,
                                      const at::Tensor& weight) {
  return mixed_by_experts(tokens, choices, weight,
                          {into_, down_proj_, into_experts(options_.kind).activation},
                          {.ep = ep_,
                           .capacity_factor = options_.capacity_factor,
                           .exchange = options_.exchange,
                           .agreed_tokens = &agreed_tokens_});
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

// --- loads ---------------------------------------------------------------------------------------

at::Tensor load_balancing_loss(std::span<const RouterLoad> layers, const MeshAxis* tp) {
  std::vector<at::Tensor> probabilities;
  std::vector<at::Tensor> shares;
  for (const RouterLoad& load : layers) {
    probabilities.push_back(load.mean_probability);
    shares.push_back(load.share);
  }
  const at::Tensor probability = mean_over_ranks(at::stack(probabilities).mean(0), tp);
  const at::Tensor share = mean_over_ranks(at::stack(shares).mean(0), tp);
  return probability.dot(share) * probability.size(0);
}

void append_load(RouterLoad load, double capacity_factor, BlockOutput& output) {
  output.push_back(std::move(load.mean_probability));
  output.push_back(std::move(load.share));
  if (capacity_factor == 0) return;
  const at::Tensor none = at::zeros({1}, output.back().options());
  output.push_back(load.dropped.defined() ? std::move(load.dropped) : none);
}

void ExpertLoads::take(const BlockOutput& output) {
  const size_t num_tensors = counts_dropped_ ? 3 : 2;
  if (output.size() <= num_tensors) return;
  const auto first = output.end() - static_cast<ptrdiff_t>(num_tensors);
  loads_.push_back({first[0], first[1], counts_dropped_ ? first[2] : at::Tensor()});
}

void ExpertLoads::add_to(ModelLoss& loss, double weight, const MeshAxis* tp) const {
  if (loads_.empty()) return;
  const at::Tensor balance = load_balancing_loss(loads_, tp);
  if (weight != 0.0) loss.total = loss.total + balance * weight;
  loss.terms.push_back({"load_balance", balance.detach()});
  if (!counts_dropped_) return;
  std::vector<at::Tensor> dropped;
  for (const RouterLoad& load : loads_) dropped.push_back(load.dropped);
  loss.terms.push_back({"dropped", mean_over_ranks(at::cat(dropped).mean(), tp)});
}

void even_out_loads(const torch::nn::Module& model, const Mesh& mesh) {
  std::vector<RouterImpl*> routers;
  std::vector<at::Tensor> counts;
  for (const std::shared_ptr<torch::nn::Module>& module : model.modules()) {
    auto* router = dynamic_cast<RouterImpl*>(module.get());
    if (router == nullptr || !router->num_chosen().defined()) continue;
    routers.push_back(router);
    counts.push_back(router->num_chosen());
  }
  if (routers.empty()) return;
  at::Tensor sums = at::cat(counts);
  for (const MeshAxis* axis : {&mesh.inner(), &mesh.outer()})
    axis->reduce().all_reduce(sums, {}, "loads of experts").wait();
  int64_t begin = 0;
  for (RouterImpl* router : routers) {
    const int64_t num_experts = router->num_chosen().numel();
    router->update_bias(sums.narrow(0, begin, num_experts));
    begin += num_experts;
  }
}

}  // namespace fsdp::nn
