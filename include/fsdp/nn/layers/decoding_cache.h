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
  // Mamba-2 and Gated DeltaNet: the last inputs of the convolution, [batch, kernel_size - 1,
  // channels], and the state in fp32. Of the scan: [batch, groups, heads of a group, head_dim,
  // state]; of the delta rule: [batch, value_heads, key_dim, value_dim].
  at::Tensor window;
  at::Tensor state;
};

// Constructed empty; LanguageModel::next_logits() fills it.
struct DecodingCache {
  std::vector<LayerCache> layers;
};

}  // namespace fsdp
