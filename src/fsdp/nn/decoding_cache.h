// What a model keeps of the tokens that it was shown, so that the next one costs the work of one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp {

// Of one layer; what its mixer does not need stays undefined, and so does all before the first
// token.
struct LayerCache {
  // Attention: [batch, positions, kv_heads, head_dim], rotated already.
  at::Tensor key;
  at::Tensor value;
  // Mamba-2: the last inputs of its convolution, [batch, kernel_size - 1, channels], and the state
  // of its scan, [batch, groups, heads of a group, head_dim, state], fp32.
  at::Tensor window;
  at::Tensor state;
};

// Made empty, and filled by LanguageModel::next_logits().
struct DecodingCache {
  std::vector<LayerCache> layers;
};

}  // namespace fsdp
