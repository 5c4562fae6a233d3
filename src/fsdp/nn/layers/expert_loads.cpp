#include "fsdp/nn/layers/expert_loads.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"

namespace fsdp::nn {

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
