#include "fsdp/nn/embedding.h"

#include <ATen/ATen.h>

namespace fsdp::nn {

EmbeddingImpl::EmbeddingImpl(int64_t vocab_size, int64_t hidden_size, double standard_deviation)
    : weight(register_parameter("weight", at::empty({vocab_size, hidden_size}))),
      standard_deviation_(standard_deviation) {}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  return at::embedding(weight, tokens);
}

void EmbeddingImpl::reset_parameters() { fill_normal(weight, "weight", standard_deviation_); }

}  // namespace fsdp::nn
