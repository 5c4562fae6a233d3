#include "fsdp/shard/engine/unit_call.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/shard/engine/backward_errors.h"
#include "fsdp/shard/recompute.h"

namespace fsdp {

namespace {

using torch::autograd::Node;

// Tells a call that autograd has reached a node. A class of its own, since Tensor::register_hook
// needs several allocations to wrap a function.
class CallHook final : public torch::autograd::FunctionPreHook {
 public:
  using Tell = void (UnitCall::*)();
  CallHook(std::shared_ptr<UnitCall> call, Tell tell) : call_(std::move(call)), tell_(tell) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    in_backward([&] { (call_.get()->*tell_)(); });
    return gradients;
  }

 private:
  const std::shared_ptr<UnitCall> call_;
  const Tell tell_;
};

// Before other hooks: if a unit returns the output of a unit inside it, the outer one begins first.
void add_hook(Node& node, std::shared_ptr<UnitCall> call, CallHook::Tell tell) {
  auto& hooks = node.tensor_pre_hooks();
  hooks.insert(hooks.begin(), std::make_unique<CallHook>(std::move(call), tell));
}

// The node that made the output, if it belongs to this call; nullptr for an output from outside (a
// returned input, say). For a view it is the node of its base, because changing a view in place
// replaces the view's own.
Node* node_of_call(const at::Tensor& output, uint64_t first_node) {
  Node* node = (output.is_view() ? output._base() : output).grad_fn().get();
  return node != nullptr && node->sequence_nr() >= first_node ? node : nullptr;
}

}  // namespace

UnitCall::UnitCall(std::shared_ptr<Engine> engine, ShardedUnit& unit)
    : engine_(engine),
      running_(std::move(engine)),
      unit_(unit),
      mode_(running_->begin_call(unit)),
      number_(running_->next_call_number()),
      has_gradients_(at::GradMode::is_enabled()),
      will_be_recomputed_(!has_gradients_ && recompute_state() == RecomputeState::kFirstForward) {
  if (has_gradients_ || will_be_recomputed_) pending_since_ = running_->count_call(unit);
}

UnitCall::~UnitCall() {
  if (const std::shared_ptr<Engine> engine = engine_.lock()) stop_pending(*engine);
}

void UnitCall::stop_pending(Engine& engine) {
  if (pending_since_) engine.uncount_call(unit_, *std::exchange(pending_since_, std::nullopt));
}

void UnitCall::enter(std::span<at::Tensor* const> inputs) {
  times_ = running_->weights().begin_use(unit_, Phase::kForward, mode_);
  is_forward_open_ = true;
  if (!has_gradients_) return;
  for (at::Tensor* input : inputs) {
    if (!input->requires_grad()) continue;
    *input = input->view_as(*input);
    add_hook(*input->grad_fn(), shared_from_this(), &UnitCall::end_backward);
  }
  first_node_ = at::sequence_number::peek();
}

void UnitCall::leave(std::span<at::Tensor* const> outputs) {
  for (at::Tensor* output : outputs) {
    if (!has_gradients_ || !output->requires_grad()) continue;
    Node* node = node_of_call(*output, first_node_);
    if (node == nullptr) {
      *output = output->view_as(*output);
      node = output->grad_fn().get();
    }
    add_hook(*node, shared_from_this(), &UnitCall::begin_backward);
  }
  if (will_be_recomputed_) keep_until_recomputed(shared_from_this());
  is_forward_open_ = false;
  const std::shared_ptr<Engine> engine = std::move(running_);
  engine->weights().end_use(unit_, times_, Phase::kForward, mode_);
}

void UnitCall::fail() noexcept {
  if (!is_forward_open_) return;
  is_forward_open_ = false;
  try {
    running_->weights().end_use(unit_, times_, Phase::kForward, mode_);
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, "unit '", unit_.name(), "' could not be released: ", error.what());
  }
  running_.reset();
}

void UnitCall::begin_backward() {
  const std::shared_ptr<Engine> engine = engine_.lock();
  if (engine == nullptr) return;
  Engine::refuse_second_order();
  engine->enter_backward();
  engine->end_calls_after(number_);
  if (is_in_backward(*engine)) return;  // another output came first
  backward_number_ = engine->backward_number();
  is_through_ = false;
  times_ = engine->weights().begin_use(unit_, Phase::kBackward, mode_);
  engine->begin_call_backward(shared_from_this(), unit_, /*is_repeated=*/!pending_since_);
}

void UnitCall::end_backward() {
  const std::shared_ptr<Engine> engine = engine_.lock();
  if (engine == nullptr || !is_in_backward(*engine) || is_through_) return;
  engine->end_calls_after(number_);
  is_through_ = true;
  engine->weights().end_use(unit_, times_, Phase::kBackward, mode_);
  stop_pending(*engine);
  engine->call_is_through(unit_);
}

}  // namespace fsdp
