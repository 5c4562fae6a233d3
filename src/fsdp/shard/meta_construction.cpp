#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "fsdp/shard/parameter_init.h"

namespace fsdp {

namespace {

// A mode key of the dispatcher that libtorch leaves to programs: operators come here first while it
// is included, with or without tensors among their arguments.
constexpr c10::DispatchKey kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Puts `meta` wherever an operator has an optional device that was not given, which is what the
// operators that make tensors have; everything else passes unchanged.
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

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&construct_on_meta>());
}

MetaConstruction::MetaConstruction() : was_on_(c10::impl::tls_is_dispatch_key_included(kMode)) {
  c10::impl::tls_set_dispatch_key_included(kMode, true);
}

MetaConstruction::~MetaConstruction() { c10::impl::tls_set_dispatch_key_included(kMode, was_on_); }

}  // namespace fsdp
