#include "fsdp/shard/group/quantized_parameter.h"

#include <c10/core/TensorImpl.h>

#include <utility>

namespace fsdp {

namespace {

struct QuantizedTag final : c10::BackendMeta {
  explicit QuantizedTag(std::function<QuantizedWeight()> source) : current(std::move(source)) {}
  const std::function<QuantizedWeight()> current;
};

}  // namespace

void tag_quantized(const at::Tensor& parameter, std::function<QuantizedWeight()> current) {
  c10::intrusive_ptr<c10::BackendMeta> tag;
  if (current) tag = c10::make_intrusive<QuantizedTag>(std::move(current));
  parameter.unsafeGetTensorImpl()->set_backend_meta(std::move(tag));
}

std::optional<QuantizedWeight> quantized_weight(const at::Tensor& parameter) {
  if (!parameter.defined()) return std::nullopt;
  const auto tag = parameter.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  const auto* quantized = dynamic_cast<const QuantizedTag*>(tag.get());
  if (quantized == nullptr) return std::nullopt;
  return quantized->current();
}

}  // namespace fsdp
