#include "fsdp/nn/layers/router.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "fsdp/nn/layers/linear.h"

namespace fsdp::nn {

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

}  // namespace fsdp::nn
