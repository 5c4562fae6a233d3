#include "fsdp/optim/rule_spans.h"

#include <algorithm>

#include "fsdp/base/error.h"

namespace fsdp {

namespace {

// A tensor with elements.
struct PlacedTensor {
  FlatRange flat;
  HyperParameters hyper;
};

std::vector<PlacedTensor> in_flat_order(const FlatLayout& layout,
                                        std::span<const HyperParameters> of_tensors) {
  std::vector<PlacedTensor> placed;
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    const FlatRange flat = layout.tensor_range(tensor);
    if (!flat.empty()) placed.push_back({flat, of_tensors[static_cast<size_t>(tensor)]});
  }
  std::sort(placed.begin(), placed.end(), [](const PlacedTensor& a, const PlacedTensor& b) {
    return a.flat.begin < b.flat.begin;
  });
  return placed;
}

// Where nothing but padding is, there is nothing to change: its weights and gradients are zeros.
void add_spans(std::span<const PlacedTensor> tensors, const ShardRange& range,
               std::vector<RuleSpan>& spans) {
  RuleSpan span{range.flat, range.local_begin, {}};
  auto tensor = std::partition_point(tensors.begin(), tensors.end(), [&](const PlacedTensor& each) {
    return each.flat.end <= range.flat.begin;
  });
  if (tensor != tensors.end() && tensor->flat.begin < range.flat.end) span.hyper = tensor->hyper;
  for (; tensor != tensors.end() && tensor->flat.begin < range.flat.end; ++tensor) {
    if (tensor->hyper == span.hyper) continue;
    span.flat.end = tensor->flat.begin;
    spans.push_back(span);
    span = {{tensor->flat.begin, range.flat.end},
            range.local_begin + (tensor->flat.begin - range.flat.begin),
            tensor->hyper};
  }
  if (!span.flat.empty()) spans.push_back(span);
}

}  // namespace

std::vector<RuleSpan> rule_spans(const FlatLayout& layout,
                                 std::span<const HyperParameters> of_tensors,
                                 std::span<const ShardRange> shard) {
  FSDP_ASSERT(static_cast<int64_t>(of_tensors.size()) == layout.num_tensors());
  const std::vector<PlacedTensor> tensors = in_flat_order(layout, of_tensors);
  std::vector<RuleSpan> spans;
  for (const ShardRange& range : shard) add_spans(tensors, range, spans);
  return spans;
}

}  // namespace fsdp
