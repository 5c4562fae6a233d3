// The module tree of a Python model, as the engine sees it.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/shard/layer_weights.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/shard/unit.h"

namespace fsdp {

// One Python module. Its parameters and buffers are Python's own tensors, so what the engine does
// to their storage reaches Python; its children mirror Python's children under the same names.
//
// A mirror knows its Python module only through `initialize`, and only until fully_shard() is over:
// neither side keeps the other alive.
class ModuleMirror : public torch::nn::Module, public ParameterInit, public QuantizableModule {
 public:
  // `initialize` gives tensors that are on the meta device their first values; empty where Python
  // knows none. `multiplies_codes`: the module computes its `weight` by fsdp_cpp._C.linear().
  ModuleMirror(std::string class_name, std::function<void()> initialize, bool multiplies_codes);

  void add_parameter(const std::string& name, const at::Tensor& parameter);
  void add_buffer(const std::string& name, const at::Tensor& buffer);
  void add_child(const std::string& name, const std::shared_ptr<ModuleMirror>& child);

  void reset_parameters() override;
  bool is_quantizable(const std::string& parameter) const override;
  // Drops `initialize` here and in all children.
  void forget_initialization();

  // Ends the engine's hold of this module and all children.
  void detach();

 private:
  virtual void detach_self() {}

  std::function<void()> initialize_;
  const bool multiplies_codes_;
  std::vector<std::shared_ptr<ModuleMirror>> children_;
};

// A Python module that is a unit.
class UnitMirror final : public ModuleMirror, public UnitBase {
 public:
  using ModuleMirror::ModuleMirror;

  // Before the module's forward; `inputs` become what the forward gets. nullptr where the engine is
  // gone.
  std::shared_ptr<UnitHooks::Call> enter(std::vector<at::Tensor>& inputs);

 private:
  void detach_self() override { attach(nullptr); }
};

// After it; `outputs` become what the caller gets.
void leave(UnitHooks::Call& call, std::vector<at::Tensor>& outputs);

}  // namespace fsdp
