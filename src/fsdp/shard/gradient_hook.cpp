#include "fsdp/shard/gradient_hook.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/error.h"
#include "fsdp/shard/direct_gradient.h"

namespace fsdp {

namespace {

// Autograd runs an accumulator on the stream that was current when it was made: that of
// fully_shard(), or of a graph. The unit may compute on another one.
class OnStreamOfUnit {
 public:
  OnStreamOfUnit(const UnitState& unit, const at::Tensor& gradient) {
    if (!unit.stream) return;
    const c10::Stream accumulator = current_stream(unit.stream->device());
    if (accumulator == *unit.stream) return;
    follow(*unit.stream, accumulator);
    if (gradient.defined() && gradient.has_storage()) used_on(*unit.stream, gradient);
    guard_.reset_stream(*unit.stream);
  }

 private:
  c10::OptionalStreamGuard guard_;
};

class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(const std::shared_ptr<Engine>& engine, UnitState& unit, GroupState& state,
               int64_t member)
      : engine_(engine), unit_(unit), state_(state), member_(member) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (const std::shared_ptr<Engine> engine = engine_.lock()) {
      const at::Tensor& parameter = state_.group->members()[static_cast<size_t>(member_)].parameter;
      at::Tensor gradient = std::move(parameter.mutable_grad());
      parameter.mutable_grad() = at::Tensor();
      const OnStreamOfUnit stream(unit_, gradient);
      engine->gradient_ready(unit_, state_, member_, gradient);
    }
    return outputs;
  }

  bool is_alive() const { return !engine_.expired(); }

  DirectGradient offer(GradientType type) const {
    const std::shared_ptr<Engine> engine = engine_.lock();
    if (engine == nullptr) return {};
    Engine::DirectTarget target = engine->direct_target(unit_, state_, member_, type);
    return {std::move(target.target), target.adds ? 1.0 : 0.0};
  }

 private:
  const std::weak_ptr<Engine> engine_;
  UnitState& unit_;  // valid while the engine is
  GroupState& state_;
  const int64_t member_;
};

// A parameter that is whole can be used outside of any unit, and then its gradient may be the first
// thing of a backward that we hear of: autograd must not find the stand-in there.
class BeforeAccumulation final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulation(const std::shared_ptr<Engine>& engine) : engine_(engine) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (const std::shared_ptr<Engine> engine = engine_.lock();
        engine && !engine->is_in_backward()) {
      Engine::refuse_second_order();
      engine->enter_backward();
    }
    // Autograd's own list, which it replaces by what is returned: a copy would be an allocation for
    // every parameter and backward.
    return std::move(const_cast<torch::autograd::variable_list&>(gradients));
  }

 private:
  const std::weak_ptr<Engine> engine_;
};

// libtorch 2.13 counts references to nodes otherwise than 2.11.
using NodePointer =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// The accumulator, and with it the hook, lives as long as the engine.
const GradientHook* hook_of(const at::Tensor& parameter) {
  if (!parameter.defined() || !parameter.requires_grad()) return nullptr;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (accumulator == nullptr) return nullptr;
  for (const auto& hook : accumulator->post_hooks())
    if (const auto* ours = dynamic_cast<const GradientHook*>(hook.get())) return ours;
  return nullptr;
}

}  // namespace

std::shared_ptr<void> attach_gradient_hooks(const std::shared_ptr<Engine>& engine) {
  auto accumulators = std::make_shared<std::vector<NodePointer>>();
  for (const auto& unit : engine->units()) {
    for (GroupState& state : unit->groups) {
      if (!state.group->is_trainable()) continue;
      const auto& members = state.group->members();
      for (size_t i = 0; i < members.size(); ++i) {
        FSDP_CHECK(
            !has_gradient_hook(members[i].parameter), "parameter '", members[i].names.front(),
            "' is still part of a loss that waits for its backward; let go of the loss first");
        accumulators->push_back(torch::autograd::impl::grad_accumulator(members[i].parameter));
        accumulators->back()->add_post_hook(
            std::make_unique<GradientHook>(engine, *unit, state, static_cast<int64_t>(i)));
        if (!state.group->needs_slab())
          accumulators->back()->add_pre_hook(std::make_unique<BeforeAccumulation>(engine));
      }
    }
  }
  return accumulators;
}

void attach_gradient_hooks_anew(Engine& engine) {
  engine.keep(nullptr);
  engine.keep(attach_gradient_hooks(engine.shared_from_this()));
}

bool has_gradient_hook(const at::Tensor& parameter) {
  const GradientHook* hook = hook_of(parameter);
  return hook != nullptr && hook->is_alive();
}

DirectGradient direct_gradient(const at::Tensor& parameter, GradientType type) {
  const GradientHook* hook = hook_of(parameter);
  return hook == nullptr ? DirectGradient{} : hook->offer(type);
}

}  // namespace fsdp
