#include "fsdp/shard/unit_call.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/log.h"

namespace fsdp {

UnitCall::UnitCall(std::shared_ptr<Engine> engine, UnitState& unit)
    : engine_(engine),
      running_(std::move(engine)),
      unit_(unit),
      mode_(running_->begin_call(unit)),
      number_(running_->next_call_number()) {}

void UnitCall::enter(const std::vector<at::Tensor*>& inputs) {
  times_ = running_->begin_use(unit_, Phase::kForward, mode_);
  is_forward_open_ = true;
  has_gradients_ = at::GradMode::is_enabled();
  if (!has_gradients_) return;
  for (at::Tensor* input : inputs) {
    if (!input->requires_grad()) continue;
    *input = input->view_as(*input);
    input->register_hook([call = shared_from_this()](const at::Tensor&) { call->end_backward(); });
    has_input_hook_ = true;
  }
}

void UnitCall::leave(const std::vector<at::Tensor*>& outputs) {
  for (at::Tensor* output : outputs) {
    if (!has_gradients_ || !output->requires_grad()) continue;
    // An output that is an input would have the two hooks in the wrong order.
    *output = output->view_as(*output);
    output->register_hook(
        [call = shared_from_this()](const at::Tensor&) { call->begin_backward(); });
  }
  is_forward_open_ = false;
  const std::shared_ptr<Engine> engine = std::move(running_);
  engine->end_use(unit_, times_, Phase::kForward, mode_);
}

void UnitCall::fail() noexcept {
  if (!is_forward_open_) return;
  is_forward_open_ = false;
  try {
    running_->end_use(unit_, times_, Phase::kForward, mode_);
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, "unit '", unit_.name, "' could not be let go: ", error.what());
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
  times_ = engine->begin_use(unit_, Phase::kBackward, mode_);
  if (!has_input_hook_) engine->add_call_without_end(shared_from_this());
}

void UnitCall::end_backward() {
  const std::shared_ptr<Engine> engine = engine_.lock();
  if (engine == nullptr || !is_in_backward(*engine) || is_through_) return;
  engine->end_calls_after(number_);
  is_through_ = true;
  engine->end_use(unit_, times_, Phase::kBackward, mode_);
  engine->call_is_through(unit_);
}

}  // namespace fsdp
