#include "fsdp/optim/optimizer.h"

#include <utility>

#include "fsdp/optim/optimizer_impl.h"

namespace fsdp {

Optimizer::Optimizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Optimizer::~Optimizer() = default;

void Optimizer::step() { impl_->step(); }
void Optimizer::zero_grad() { impl_->sharded().zero_grad(); }
void Optimizer::set_learning_rate(double rate) { impl_->set_learning_rate(rate); }
double Optimizer::learning_rate() const { return impl_->learning_rate(); }
const at::Tensor& Optimizer::learning_rate_on_device() const {
  return impl_->learning_rate_on_device();
}
void Optimizer::set_rule(size_t index, double weight_decay, double rate_scale) {
  impl_->set_rule(index, weight_decay, rate_scale);
}
void Optimizer::set_momenta(const Momenta& momenta) { impl_->set_momenta(momenta); }
at::Tensor Optimizer::scaled(const at::Tensor& loss) const { return impl_->scaled(loss); }
StepState Optimizer::state() const { return impl_->state(); }
double Optimizer::gradient_norm() const { return impl_->gradient_norm(); }
void Optimizer::wait() const { impl_->wait(); }
const std::string& Optimizer::name() const { return impl_->name(); }
std::vector<OptimizerShard> Optimizer::shards() const { return impl_->shards(); }
void Optimizer::set_shards(std::span<const OptimizerShard> shards) { impl_->set_shards(shards); }
void Optimizer::set_state(const StepState& state) { impl_->set_state(state); }
const Sharded& Optimizer::sharded() const { return impl_->sharded(); }

}  // namespace fsdp
