#include "fsdp/shard/engine/gradient_hook.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/shard/direct_gradient.h"
#include "fsdp/shard/engine/backward_errors.h"

namespace fsdp {

namespace {

// Autograd runs an accumulator on the stream that was current when it was made: that of
// fully_shard(), or of a graph. The unit may compute on another one.
class OnStreamOfUnit {
 public:
  OnStreamOfUnit(const ShardedUnit& unit, const at::Tensor& gradient) {
    if (!unit.stream()) return;
    const c10::Stream stream = *unit.stream();
    const c10::Stream accumulator = current_stream(stream.device());
    if (accumulator == stream) return;
    follow(stream, accumulator);
    if (gradient.defined() && gradient.has_storage()) used_on(stream, gradient);
    guard_.reset_stream(stream);
  }

 private:
  c10::OptionalStreamGuard guard_;
};

class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(const std::shared_ptr<Engine>& engine, ShardedUnit& unit, ParamGroup& group,
               int64_t member)
      : engine_(engine), unit_(unit), group_(group), member_(member) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (const std::shared_ptr<Engine> engine = engine_.lock()) {
      const at::Tensor& parameter = group_.members()[static_cast<size_t>(member_)].parameter;
      at::Tensor gradient = std::move(parameter.mutable_grad());
      parameter.mutable_grad() = at::Tensor();
      const OnStreamOfUnit stream(unit_, gradient);
      in_backward([&] { engine->gradient_ready(unit_, group_, member_, gradient); });
    }
    return outputs;
  }

  bool is_alive() const { return !engine_.expired(); }

  DirectGradient offer(GradientType type) const {
    const std::shared_ptr<Engine> engine = engine_.lock();
    if (engine == nullptr) return {};
    Gradients::DirectTarget target = engine->direct_target(unit_, group_, member_, type);
    return {std::move(target.target), target.adds ? 1.0 : 0.0};
  }

 private:
  const std::weak_ptr<Engine> engine_;
  ShardedUnit& unit_;  // valid while the engine is
  ParamGroup& group_;
  const int64_t member_;
};

// A whole parameter can be used outside of any unit; then its gradient may be the first sign of a
// backward, and autograd must not find the stand-in there.
class BeforeAccumulation final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulation(const std::shared_ptr<Engine>& engine) : engine_(engine) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (const std::shared_ptr<Engine> engine = engine_.lock();
        engine && !engine->is_in_backward()) {
      in_backward([&] {
        Engine::refuse_second_order();
        engine->enter_backward();
      });
    }
    // Moves autograd's own list, which autograd replaces by the result: a copy would be an
    // allocation per parameter and backward.
    return std::move(const_cast<torch::autograd::variable_list&>(gradients));
  }

 private:
  const std::weak_ptr<Engine> engine_;
};

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

GradientHooks::GradientHooks(const std::shared_ptr<Engine>& engine) {
  for (const auto& unit : engine->units()) {
    for (ParamGroup& group : unit->groups()) {
      if (!group.is_trainable()) continue;
      for (size_t i = 0; i < group.members().size(); ++i) {
        const GroupMember& member = group.members()[i];
        FSDP_CHECK(
            !has_gradient_hook(member.parameter), "parameter '", member.names.front(),
            "' is still part of a loss that waits for its backward; let go of the loss first");
        accumulators_.push_back(torch::autograd::impl::grad_accumulator(member.parameter));
        torch::autograd::Node& accumulator = *accumulators_.back();
        accumulator.add_post_hook(
            std::make_unique<GradientHook>(engine, *unit, group, static_cast<int64_t>(i)));
        if (!group.needs_slab())
          accumulator.add_pre_hook(std::make_unique<BeforeAccumulation>(engine));
      }
    }
  }
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
