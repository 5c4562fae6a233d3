#include "fsdp/shard/parameter_init.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

namespace nn = torch::nn;

template <typename Layer>
bool reset_if(nn::Module& module) {
  auto* layer = dynamic_cast<Layer*>(&module);
  if (layer != nullptr) layer->reset_parameters();
  return layer != nullptr;
}

template <typename... Layers>
bool reset_if_any(nn::Module& module) {
  return (reset_if<Layers>(module) || ...);
}

// A mode key of the dispatcher that libtorch leaves to programs: while it is included, operators
// come here first, with or without tensors among their arguments.
constexpr c10::DispatchKey kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Puts `meta` in place of an optional device that was not given, which the operators that make
// tensors have; everything else passes unchanged.
void construct_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  bool has_tensors = false;
  for (size_t i = 0; i < arguments.size(); ++i)
    has_tensors |= (*stack)[first + i].isTensor() || (*stack)[first + i].isTensorList();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    // empty_like and to() take the device of their tensor.
    if (arguments[i].name() == "device" && value.isNone() && !has_tensors)
      value = c10::Device(c10::kMeta);
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(kMode);
  op.callBoxed(stack);
}

}  // namespace

void initialize_parameters(nn::Module& module, const std::string& name) {
  const bool is_known =
      reset_if_any<ParameterInit, nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl,
                   nn::EmbeddingBagImpl, nn::LayerNormImpl, nn::GroupNormImpl, nn::BatchNorm1dImpl,
                   nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::Conv1dImpl, nn::Conv2dImpl,
                   nn::Conv3dImpl, nn::ConvTranspose1dImpl, nn::ConvTranspose2dImpl,
                   nn::ConvTranspose3dImpl, nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl>(module);
  FSDP_CHECK(is_known, "module '", name, "' (", module.name(),
             ") has parameters on the meta device, and nothing says how to initialise them; "
             "derive it from fsdp::ParameterInit");
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&construct_on_meta>());
}

MetaConstruction::MetaConstruction() : was_on_(c10::impl::tls_is_dispatch_key_included(kMode)) {
  c10::impl::tls_set_dispatch_key_included(kMode, true);
}

MetaConstruction::~MetaConstruction() { c10::impl::tls_set_dispatch_key_included(kMode, was_on_); }

}  // namespace fsdp
