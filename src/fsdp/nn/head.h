// The end of a language model: final norm and output matrix, one unit.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/named_init.h"
#include "fsdp/nn/rms_norm.h"

namespace fsdp::nn {

// A prediction layer has a final norm of its own and uses the output matrix alone.
enum class HeadInput : uint8_t { kHidden, kNormed };

struct HeadOptions {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  double norm_eps = 1e-5;
  double standard_deviation = 0.02;
  // The embedding's weight, when the output matrix is the same.
  at::Tensor tied_weight = {};
};

// Of a configuration; `embedding` is the weight that the output matrix may be.
template <typename Config>
HeadOptions head_options(const Config& config, double norm_eps, const at::Tensor& embedding) {
  return {.vocab_size = config.vocab_size,
          .hidden_size = config.hidden_size,
          .norm_eps = norm_eps,
          .standard_deviation = config.initializer_range,
          .tied_weight = config.tie_word_embeddings ? embedding : at::Tensor()};
}

// What the next token depends on: [batch, sequence, hidden_size] -> [batch, 1, hidden_size].
at::Tensor last_position(const at::Tensor& hidden);

class HeadImpl : public torch::nn::Module, public NamedInit {
 public:
  explicit HeadImpl(const HeadOptions& options);
  // Logits: [batch, sequence, vocab_size].
  at::Tensor forward(const at::Tensor& x, HeadInput input);
  void reset_parameters() override;

  at::Tensor weight;

 private:
  const bool is_tied_;
  const double standard_deviation_;
  RmsNorm norm_;
};
TORCH_MODULE(Head);

}  // namespace fsdp::nn
