#include "fsdp/shard/engine/gradient_hooks.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/shard/engine/backward_errors.h"
#include "fsdp/shard/engine/unit_call.h"
#include "fsdp/shard/layer_weights.h"

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
  GradientHook(const std::shared_ptr<UnitCalls>& calls, ShardedUnit& unit, ParamGroup& group,
               int64_t member)
      : calls_(calls), unit_(unit), group_(group), member_(member) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (const std::shared_ptr<UnitCalls> calls = calls_.lock()) {
      const at::Tensor& parameter = group_.members()[static_cast<size_t>(member_)].parameter;
      at::Tensor gradient = std::move(parameter.mutable_grad());
      parameter.mutable_grad() = at::Tensor();
      const OnStreamOfUnit stream(unit_, gradient);
      in_backward([&] {
        calls->enter_backward();
        calls->gradients().accept(unit_, group_, member_, gradient);
      });
    }
    return outputs;
  }

  bool is_alive() const { return !calls_.expired(); }

  DirectGradient offer(GradientType type) const {
    const std::shared_ptr<UnitCalls> calls = calls_.lock();
    // A unit that is used again later in this backward would keep its slab all that time.
    if (calls == nullptr || !calls->is_in_backward() || calls->num_pending(unit_) > 1) return {};
    GroupGradient::Direct target = calls->gradients().direct_target(unit_, group_, member_, type);
    return {std::move(target.target), target.adds ? 1.0 : 0.0};
  }

 private:
  const std::weak_ptr<UnitCalls> calls_;
  ShardedUnit& unit_;  // valid while the engine is
  ParamGroup& group_;
  const int64_t member_;
};

// A whole parameter can be used outside of any unit; then its gradient may be the first sign of a
// backward, and autograd must not find the stand-in there.
class BeforeAccumulation final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulation(const std::shared_ptr<UnitCalls>& calls) : calls_(calls) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (const std::shared_ptr<UnitCalls> calls = calls_.lock(); calls && !calls->is_in_backward())
      in_backward([&] { calls->enter_backward(); });
    // Moves autograd's own list, which autograd replaces by the result: a copy would be an
    // allocation per parameter and backward.
    return std::move(const_cast<torch::autograd::variable_list&>(gradients));
  }

 private:
  const std::weak_ptr<UnitCalls> calls_;
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

at::Tensor untouchable_like(const at::Tensor& parameter, const std::string& sentence) {
  const c10::Device device = parameter.device();
  c10::Storage storage(c10::Storage::use_byte_size_t(), parameter.nbytes(),
                       c10::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(sentence);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(parameter.scalar_type(), std::nullopt, device)),
      parameter.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(parameter.sizes());
  return tensor;
}

}  // namespace

GradientHooks::GradientHooks(const std::shared_ptr<UnitCalls>& calls, const ShardedUnits& units) {
  for (const auto& unit : units) {
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
            std::make_unique<GradientHook>(calls, *unit, group, static_cast<int64_t>(i)));
        if (!group.needs_slab())
          accumulator.add_pre_hook(std::make_unique<BeforeAccumulation>(calls));
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

// --- stand-ins -----------------------------------------------------------------------------------

void GradientStandIns::add(const at::Tensor& parameter, const std::string& name) {
  FSDP_ASSERT(!are_put_);
  parameter.mutable_grad() = at::Tensor();
  const std::string sentence = concat(
      "grad() of parameter '", name,
      "' is touched, but the model is sharded and so are its gradients; update with "
      "fsdp::AdamW or fsdp::SGD (their step.max_norm clips), clear with zero_grad() of those "
      "or of Sharded, and read Sharded::parameters()");
  stand_ins_.push_back(
      {parameter, untouchable_like(parameter, in_language_of_program(sentence)), name});
}

void GradientStandIns::put() {
  for (const StandIn& each : stand_ins_) each.parameter.mutable_grad() = each.stand_in;
  are_put_ = true;
}

void GradientStandIns::take() {
  if (!are_put_) return;
  for (const StandIn& each : stand_ins_) each.parameter.mutable_grad() = at::Tensor();
  are_put_ = false;
}

GradientStandIns::Missing GradientStandIns::missing() const {
  if (!are_put_) return Missing::kNone;
  if (std::all_of(stand_ins_.begin(), stand_ins_.end(), std::mem_fn(&StandIn::is_there)))
    return Missing::kNone;
  const bool are_cleared =
      std::none_of(stand_ins_.begin(), stand_ins_.end(),
                   [](const StandIn& each) { return each.parameter.grad().defined(); });
  return are_cleared ? Missing::kAll : Missing::kSome;
}

const std::string& GradientStandIns::name_of_missing() const {
  const auto found = std::find_if(stand_ins_.begin(), stand_ins_.end(),
                                  [](const StandIn& each) { return !each.is_there(); });
  FSDP_ASSERT(found != stand_ins_.end());
  return found->name;
}

}  // namespace fsdp
