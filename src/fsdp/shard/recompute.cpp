#include "fsdp/shard/recompute.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <mutex>
#include <optional>
#include <utility>

namespace fsdp {

namespace {

thread_local RecomputeState state = RecomputeState::kNone;

// Gives a variable another value for the guard's life.
template <typename Value>
class ValueGuard {
 public:
  ValueGuard(Value& variable, Value now)
      : variable_(variable), before_(std::exchange(variable, now)) {}
  ~ValueGuard() { variable_ = before_; }
  ValueGuard(const ValueGuard&) = delete;
  ValueGuard& operator=(const ValueGuard&) = delete;

 private:
  Value& variable_;
  const Value before_;
};

// The generators a function may draw from: the host's, and that of the inputs' device.
struct RandomState {
  std::vector<std::pair<at::Generator, at::Tensor>> states;

  static RandomState now(const std::vector<at::Tensor>& inputs) {
    RandomState random;
    random.save(at::detail::getDefaultCPUGenerator());
    for (const at::Tensor& input : inputs) {
      if (!input.defined() || input.device().is_cpu()) continue;
      random.save(at::globalContext().defaultGenerator(input.device()));
      break;
    }
    return random;
  }

  void save(at::Generator generator) {
    const std::scoped_lock lock(generator.mutex());
    states.emplace_back(generator, generator.get_state());
  }

  void restore() const {
    for (auto [generator, saved] : states) {
      const std::scoped_lock lock(generator.mutex());
      generator.set_state(saved);
    }
  }
};

// The state with which the backward runs the function again.
struct Replay final : torch::CustomClassHolder {
  TensorFunction function;
  RandomState random;
  std::vector<std::shared_ptr<void>> kept;
};

thread_local Replay* running = nullptr;  // whose first forward runs

class Recompute final : public torch::autograd::Function<Recompute> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const c10::intrusive_ptr<Replay>& replay,
                                                at::TensorList inputs) {
    context->saved_data["replay"] = c10::IValue::make_capsule(replay);
    context->save_for_backward(inputs.vec());
    const ValueGuard guard(state, RecomputeState::kFirstForward);
    std::vector<at::Tensor> arguments = inputs.vec();
    arguments.pop_back();  // see recompute()
    const ValueGuard running_guard(running, replay.get());
    return replay->function(arguments);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto replay =
        c10::static_intrusive_pointer_cast<Replay>(context->saved_data["replay"].toCapsule());
    std::vector<at::Tensor> inputs = context->get_saved_variables();
    inputs.pop_back();
    for (at::Tensor& input : inputs) {
      if (!input.defined()) continue;
      const bool requires_grad = input.requires_grad();
      input = input.detach().set_requires_grad(requires_grad);
    }

    std::vector<at::Tensor> outputs;
    {
      const RandomState here = RandomState::now(inputs);
      replay->random.restore();
      const ValueGuard guard(state, RecomputeState::kSecondForward);
      const at::AutoGradMode with_gradients(true);
      outputs = replay->function(inputs);
      here.restore();
    }
    replay->kept.clear();
    run_inner_backward(outputs, gradients);

    torch::autograd::variable_list result(1);  // the replay itself has no gradient
    for (const at::Tensor& input : inputs)
      result.push_back(input.defined() && input.requires_grad() ? input.grad() : at::Tensor());
    result.emplace_back();
    return result;
  }

 private:
  static void run_inner_backward(const std::vector<at::Tensor>& outputs,
                                 const torch::autograd::variable_list& gradients) {
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> root_gradients;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].defined() || !outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (roots.empty()) return;
    const ValueGuard guard(state, RecomputeState::kInnerBackward);
    torch::autograd::backward(roots, root_gradients);
  }
};

}  // namespace

RecomputeState recompute_state() { return state; }

void keep_until_recomputed(std::shared_ptr<void> something) {
  if (running != nullptr) running->kept.push_back(std::move(something));
}

std::vector<at::Tensor> recompute(const TensorFunction& function,
                                  const std::vector<at::Tensor>& inputs) {
  // Without gradients, or inside another first forward, there is nothing to save.
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto replay = c10::make_intrusive<Replay>();
  replay->function = function;
  replay->random = RandomState::now(inputs);
  // Autograd calls the backward only if an input requires a gradient, but the function's parameters
  // are not among the inputs: this one stands for them.
  std::vector<at::Tensor> arguments = inputs;
  arguments.push_back(at::empty({0}).set_requires_grad(true));
  return Recompute::apply(replay, at::TensorList(arguments));
}

at::Tensor recompute(const std::function<at::Tensor(const at::Tensor&)>& function,
                     const at::Tensor& input) {
  return recompute(
      [function](const std::vector<at::Tensor>& inputs) {
        return std::vector<at::Tensor>{function(inputs[0])};
      },
      {input})[0];
}

}  // namespace fsdp
