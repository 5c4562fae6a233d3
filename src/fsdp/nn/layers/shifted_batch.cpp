#include "fsdp/nn/layers/shifted_batch.h"

#include <ATen/ATen.h>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

namespace {

// So that means over all places of all ranks are means over the first `length` of each sequence.
at::Tensor weight_of_own_places(const at::Tensor& tokens, int64_t length, const MeshAxis* tp) {
  const int64_t sequence = tokens.size(1);
  const at::Tensor weight = at::zeros(tokens.sizes(), tokens.options().dtype(at::kFloat));
  weight.narrow(1, 0, length).fill_(static_cast<double>(sequence) / static_cast<double>(length));
  return own_sequence(weight, tp).reshape({-1});
}

ShiftedBatch shifted(const at::Tensor& tokens, const at::Tensor& targets, int64_t offset,
                     const MeshAxis* tp) {
  const int64_t length = tokens.size(1) - offset;
  if (tp == nullptr)
    return {.tokens = tokens.narrow(1, offset, length),
            .targets = targets.narrow(1, offset, length),
            .token_weight = {},
            .num_own_places = length};
  ShiftedBatch shifted{.tokens = tokens.roll(-offset, 1),
                       .targets = targets.roll(-offset, 1),
                       .token_weight = weight_of_own_places(tokens, length, tp),
                       .num_own_places = tokens.size(1) / tp->size()};
  shifted.targets.narrow(1, length, offset).fill_(kNoTarget);
  return shifted;
}

}  // namespace

ShiftedBatch shifted_batch(const at::Tensor& tokens, const at::Tensor& targets, int64_t offset,
                           const MeshAxis* tp, const std::shared_ptr<const Documents>& documents) {
  ShiftedBatch batch = shifted(tokens, targets, offset, tp);
  if (!documents) return batch;
  const int64_t num_places = batch.tokens.size(1);
  batch.documents = num_places == tokens.size(1)
                        ? documents
                        : std::make_shared<const Documents>(documents->cut(num_places));
  // In another document counting began anew in between, so its positions are less.
  const at::Tensor& positions = documents->positions();
  const at::Tensor later = positions.roll(-offset, 1).narrow(1, 0, num_places);
  const at::Tensor is_other = later.ne(positions.narrow(1, 0, num_places) + offset);
  batch.targets = batch.targets.masked_fill(is_other, kNoTarget);
  return batch;
}

}  // namespace fsdp::nn
