// Layers of one matrix each, whose first values depend on its name: a projection, the embedding of
// tokens, and the head at the end of a language model.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/rms_norm.h"

namespace fsdp::nn {

// --- projection ----------------------------------------------------------------------------------

struct ProjectionOptions {
  int64_t in = 0;
  int64_t out = 0;
  bool bias = false;
  // For the weight's first values; the bias begins with 0.
  double standard_deviation = 0.02;
};

// x * weight^T + bias, computed like fsdp::nn::Linear: weight gradients go straight into the slab
// that is reduced.
class ProjectionImpl : public torch::nn::Module, public NamedInit {
 public:
  explicit ProjectionImpl(const ProjectionOptions& options);
  at::Tensor forward(const at::Tensor& input);
  void reset_parameters() override;

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out], or undefined

 private:
  const double standard_deviation_;
};
TORCH_MODULE(Projection);

// Several projections of one input.
std::vector<at::Tensor> project(const at::Tensor& input, const std::vector<Projection>& layers);

// --- embedding -----------------------------------------------------------------------------------

class EmbeddingImpl : public torch::nn::Module, public NamedInit {
 public:
  EmbeddingImpl(int64_t vocab_size, int64_t hidden_size, double standard_deviation);
  at::Tensor forward(const at::Tensor& tokens);
  void reset_parameters() override;

  at::Tensor weight;  // [vocab_size, hidden_size]

 private:
  const double standard_deviation_;
};
TORCH_MODULE(Embedding);

// --- head ----------------------------------------------------------------------------------------

// A prediction layer has its own final norm and uses only the output matrix.
enum class HeadInput : uint8_t { kHidden, kNormed };

struct HeadOptions {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  double norm_eps = 1e-5;
  double standard_deviation = 0.02;
  // The embedding's weight, if it is also the output matrix.
  at::Tensor tied_weight = {};
};

// For a configuration; `embedding` is the weight that may be the output matrix.
template <typename Config>
HeadOptions head_options(const Config& config, double norm_eps, const at::Tensor& embedding) {
  return {.vocab_size = config.vocab_size,
          .hidden_size = config.hidden_size,
          .norm_eps = norm_eps,
          .standard_deviation = config.initializer_range,
          .tied_weight = config.tie_word_embeddings ? embedding : at::Tensor()};
}

// For the next token: [batch, sequence, hidden_size] -> [batch, 1, hidden_size].
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
