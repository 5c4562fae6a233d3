// The state that a model keeps of the tokens so far, so that the next one costs the work of one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp {

// For one layer. Tensors are undefined before the first token, and those that the layer's mixer
// does not need always.
struct LayerCache {
  // Attention: [batch, positions, kv_heads, head_dim], already rotated.
  at::Tensor key;
  at::Tensor value;
  // Mamba-2: the last inputs of its convolution, [batch, kernel_size - 1, channels], and the state
  // of its scan, [batch, groups, heads of a group, head_dim, state], fp32.
  at::Tensor window;
  at::Tensor state;
};

// Constructed empty; LanguageModel::next_logits() fills it.
struct DecodingCache {
  std::vector<LayerCache> layers;
};

}  // namespace fsdp
