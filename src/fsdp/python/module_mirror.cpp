#include "fsdp/python/module_mirror.h"

#include <c10/util/SmallVector.h>

#include <utility>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

c10::SmallVector<at::Tensor*, 8> pointers_to(std::vector<at::Tensor>& tensors) {
  c10::SmallVector<at::Tensor*, 8> pointers;
  for (at::Tensor& tensor : tensors) pointers.push_back(&tensor);
  return pointers;
}

}  // namespace

ModuleMirror::ModuleMirror(std::string class_name, std::function<void()> initialize,
                           bool multiplies_codes)
    : torch::nn::Module(std::move(class_name)),
      initialize_(std::move(initialize)),
      multiplies_codes_(multiplies_codes) {}

void ModuleMirror::add_parameter(const std::string& name, const at::Tensor& parameter) {
  register_parameter(name, parameter, parameter.requires_grad());
}

void ModuleMirror::add_buffer(const std::string& name, const at::Tensor& buffer) {
  register_buffer(name, buffer);
}

void ModuleMirror::add_child(const std::string& name, const std::shared_ptr<ModuleMirror>& child) {
  register_module(name, child);
  children_.push_back(child);
}

void ModuleMirror::reset_parameters() {
  FSDP_CHECK(
      initialize_ != nullptr, "a module of class ", name(),
      " has parameters on the meta device, and nothing says how to initialise them; give the "
      "class a reset_parameters(), the model an _init_weights(module), or fully_shard() an "
      "init_weights function");
  initialize_();
}

bool ModuleMirror::is_quantizable(const std::string& parameter) const {
  if (!multiplies_codes_ || parameter != "weight") return false;
  const at::Tensor& weight = parameters_["weight"];
  return fsdp::is_quantizable(weight.size(0), weight.size(1));
}

void ModuleMirror::forget_initialization() {
  initialize_ = nullptr;
  for (const auto& child : children_) child->forget_initialization();
}

void ModuleMirror::detach() {
  detach_self();
  for (const auto& child : children_) child->detach();
}

std::shared_ptr<UnitHooks::Call> UnitMirror::enter(std::vector<at::Tensor>& inputs) {
  if (hooks_ == nullptr) return nullptr;
  std::shared_ptr<UnitHooks::Call> call = hooks_->begin_call();
  try {
    call->enter(pointers_to(inputs));
  } catch (...) {
    call->fail();
    throw;
  }
  return call;
}

void leave(UnitHooks::Call& call, std::vector<at::Tensor>& outputs) {
  try {
    call.leave(pointers_to(outputs));
  } catch (...) {
    call.fail();
    throw;
  }
}

}  // namespace fsdp
