#include "fsdp/shard/engine/unit_call.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
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

bool is_inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

// --- one call ------------------------------------------------------------------------------------

UnitCall::UnitCall(std::shared_ptr<UnitCalls> calls, ShardedUnit& unit)
    : calls_(calls),
      running_(std::move(calls)),
      unit_(unit),
      mode_(running_->begin(unit)),
      number_(running_->next_number()),
      has_gradients_(at::GradMode::is_enabled()),
      will_be_recomputed_(!has_gradients_ && recompute_state() == RecomputeState::kFirstForward) {
  if (has_gradients_ || will_be_recomputed_) pending_since_ = running_->count(unit);
}

UnitCall::~UnitCall() {
  if (const std::shared_ptr<UnitCalls> calls = calls_.lock()) stop_pending(*calls);
}

void UnitCall::stop_pending(UnitCalls& calls) {
  if (pending_since_) calls.uncount(unit_, *std::exchange(pending_since_, std::nullopt));
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
  const std::shared_ptr<UnitCalls> calls = std::move(running_);
  calls->weights().end_use(unit_, times_, Phase::kForward, mode_);
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
  const std::shared_ptr<UnitCalls> calls = calls_.lock();
  if (calls == nullptr) return;
  calls->enter_backward();
  calls->end_calls_after(number_);
  if (is_in_backward(*calls)) return;  // another output came first
  backward_number_ = calls->backward_number();
  is_through_ = false;
  times_ = calls->weights().begin_use(unit_, Phase::kBackward, mode_);
  calls->begin_backward_of(shared_from_this(), unit_, /*is_repeated=*/!pending_since_);
}

void UnitCall::end_backward() {
  const std::shared_ptr<UnitCalls> calls = calls_.lock();
  if (calls == nullptr || !is_in_backward(*calls) || is_through_) return;
  calls->end_calls_after(number_);
  is_through_ = true;
  calls->weights().end_use(unit_, times_, Phase::kBackward, mode_);
  stop_pending(*calls);
  calls->finish(unit_);
}

std::shared_ptr<UnitHooks::Call> ShardedUnit::begin_call() {
  std::shared_ptr<UnitCalls> calls = calls_.lock();
  FSDP_ASSERT(calls != nullptr);
  return std::make_shared<UnitCall>(std::move(calls), *this);
}

// --- all calls -----------------------------------------------------------------------------------

void UnitCalls::complete(std::weak_ptr<UnitCalls> self) {
  self_ = std::move(self);
  states_.resize(units_.size());
}

CallMode UnitCalls::begin(ShardedUnit& unit) {
  if (is_inside_backward()) {
    join_backward();
    return CallMode::kRecompute;
  }
  FSDP_CHECK(!in_backward_, "unit '", unit.name(),
             "' is called after a backward that did not end (an exception?); call "
             "Sharded::reset() first");
  const bool trains =
      at::GradMode::is_enabled() || recompute_state() == RecomputeState::kFirstForward;
  const Schedule::Kind kind = weights_.pass_begun_by(unit, trains);
  if (kind != Schedule::Kind::kNone) {
    gradients_.wait();
    weights_.open_pass(kind, backward_number_);
  }
  if (trains) return CallMode::kTraining;
  return weights_.is_training() ? CallMode::kInBetween : CallMode::kInference;
}

int64_t UnitCalls::count(ShardedUnit& unit) {
  ++state_of(unit).num_pending;
  for (ShardedUnit* other : unit.needs()) ++state_of(*other).num_pending;
  return generation_;
}

void UnitCalls::uncount(ShardedUnit& unit, int64_t generation) {
  if (generation != generation_) return;
  --state_of(unit).num_pending;
  for (ShardedUnit* other : unit.needs()) --state_of(*other).num_pending;
}

// --- backward ------------------------------------------------------------------------------------

void UnitCalls::enter_backward() {
  FSDP_CHECK(!at::GradMode::is_enabled(),
             "backward runs with create_graph, but gradients of a sharded model cannot be "
             "differentiated again: by then its weights are sharded; use a model that is not "
             "sharded for second-order gradients");
  join_backward();
}

void UnitCalls::join_backward() {
  if (!in_backward_) {
    gradients_.wait();     // of the backward before: its gradients may still lie where ours will
    wait_updates(units_);  // of units without a forward: they read what we will write
    gradients_.detect_external_zero_grad();
    gradients_.begin_backward();
    in_backward_ = true;
    ++backward_number_;
  }
  // A callback belongs to the innermost backward; that of a recomputed part would end too early.
  if (end_is_queued_ || recompute_state() == RecomputeState::kInnerBackward) return;
  end_is_queued_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback([self = self_] {
    if (const auto calls = self.lock()) in_backward([&] { calls->end_backward(); });
  });
}

void UnitCalls::begin_backward_of(std::shared_ptr<UnitCall> call, ShardedUnit& unit,
                                  bool is_repeated) {
  state_of(unit).is_repeated |= is_repeated;
  open_.push_back(std::move(call));
}

void UnitCalls::end_calls_after(int64_t number) {
  while (!open_.empty() && open_.back()->number() > number) {
    const std::shared_ptr<UnitCall> call = std::move(open_.back());
    open_.pop_back();
    call->end_backward();
  }
}

// Note [When a unit is reduced]
// At the end of its last call's backward, and not when all its gradients are complete: ranks may
// differ in which gradients come at all (experts without tokens), but all must reduce in the same
// order. A gradient that did not come is zero.
void UnitCalls::finish(ShardedUnit& unit) {
  reduce_if_through(unit);
  for (ShardedUnit* other : unit.needs()) reduce_if_through(*other);
  gradients_.wait_all_but(unit);
}

void UnitCalls::reduce_if_through(ShardedUnit& unit) {
  const State& state = state_of(unit);
  if (state.num_pending > 0) return;
  // A repeated backward goes through an unknown number of calls, and a gradient that is reduced
  // once per cycle takes no second reduction: so it waits for the end.
  gradients_.reduce(unit,
                    state.is_repeated ? Gradients::Which::kWithSlabs : Gradients::Which::kAll);
}

void UnitCalls::end_backward() {
  end_calls_after(-1);
  // Reduces units that no call of this backward ended, and parameters outside units, whose last use
  // nothing tells.
  for (const auto& unit : units_) gradients_.reduce(*unit, Gradients::Which::kAll);
  close_backward();
  gradients_.end_backward();
  weights_.close_pass();
  weights_.release();
}

void UnitCalls::close_backward() {
  for (State& state : states_) state.is_repeated = false;
  open_.clear();
  weights_.end_uses();
  in_backward_ = false;
  end_is_queued_ = false;
}

void UnitCalls::reset() {
  close_backward();
  ++generation_;
  for (State& state : states_) state.num_pending = 0;
}

}  // namespace fsdp
