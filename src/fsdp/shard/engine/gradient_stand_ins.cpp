#include "fsdp/shard/engine/gradient_stand_ins.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/shard/engine/backward_errors.h"

namespace fsdp {

namespace {

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
