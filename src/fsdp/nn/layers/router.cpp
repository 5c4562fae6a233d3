#include "fsdp/nn/layers/router.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "fsdp/nn/layers/linear.h"

namespace fsdp::nn {

namespace {

// Tokens per expert / all tokens.
at::Tensor shares_of(const SortedChoices& choices) {
  const at::Tensor counts =
      at::diff(choices.ends, 1, 0, at::zeros({1}, choices.ends.options())).to(at::kFloat);
  return counts.div_(static_cast<double>(choices.chosen.size(0)));
}

}  // namespace

RouterImpl::RouterImpl(const RouterOptions& options)
    : options_(options),
      weight_(register_parameter("weight", at::empty({options.num_experts, options.hidden_size}))) {
}

void RouterImpl::reset_parameters() { fill_normal(weight_, "weight", options_.standard_deviation); }

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

RoutedChoices RouterImpl::forward(const at::Tensor& tokens) {
  const bool is_softmax = options_.score == RouterScore::kSoftmax;
  const at::Tensor scores =
      is_softmax ? at::softmax(nn::linear(tokens, weight_, at::Tensor()), -1, at::kFloat)
                 : at::sigmoid(nn::linear(tokens.to(at::kFloat), weight_.to(at::kFloat), {}));
  const at::Tensor chosen =
      std::get<1>(among_open_groups(scores.detach()).topk(options_.num_chosen, -1));
  at::Tensor weight = scores.gather(1, chosen);
  // DeepSeek-V3's scores may all be 0; a softmax's are not.
  if (options_.normalizes)
    weight = weight / (is_softmax ? weight.sum(-1, true) : weight.sum(-1, true) + 1e-20);
  if (options_.scale != 1.0) weight = weight * options_.scale;

  RoutedChoices result{.weight = weight.to(tokens.scalar_type()),
                       .choices = sort_choices(chosen, options_.num_experts),
                       .load = {}};
  const at::Tensor probability = is_softmax ? scores : scores / scores.sum(-1, true);
  result.load = {.mean_probability = probability.mean(0), .share = shares_of(result.choices)};
  return result;
}

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

}  // namespace fsdp::nn
