// What a layer of multi-token prediction sees of a batch: later tokens and targets at each place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "fsdp/nn/layers/documents.h"

namespace fsdp {
class MeshAxis;
}

namespace fsdp::nn {

// Place i has the token and the target of place i + offset.
//
// Without ranks (tp is nullptr) the last `offset` places, which have no later token, are left out.
// The ranks of a tp group can share only the whole sequence evenly, so for them those places stay:
// with some token, without a target, and without weight in the load of experts. Attention is
// causal, so no other place sees them.
struct ShiftedBatch {
  at::Tensor tokens;        // [batch, places]
  at::Tensor targets;       // the same
  at::Tensor token_weight;  // [this rank's tokens], for Router; undefined: all places count
  int64_t num_own_places = 0;
  std::shared_ptr<const Documents> documents = nullptr;  // of `tokens`
};

// A place whose later token is of another of the documents has no target.
ShiftedBatch shifted_batch(const at::Tensor& tokens, const at::Tensor& targets, int64_t offset,
                           const MeshAxis* tp,
                           const std::shared_ptr<const Documents>& documents = nullptr);

}  // namespace fsdp::nn
