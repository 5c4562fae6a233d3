// Layers of one matrix each, whose first values depend on its name: a projection, the embedding of
// tokens, and the head at the end of a language model.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <vector>

#include "fsdp/nn/layers/head_loss.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/tensor_ranks.h"
#include "fsdp/shard/layer_weights.h"
#include "fsdp/shard/module_roles.h"

namespace fsdp::nn {

// --- projection ----------------------------------------------------------------------------------

// How the ranks of a tp group share a projection.
enum class ProjectionCut : uint8_t {
  kNone,     // not: each computes its tokens
  kOutputs,  // each has some outputs, of the whole sequence
  kInputs,   // each has some inputs of the whole sequence, and gets all outputs of its tokens
};

struct ProjectionOptions {
  int64_t in = 0;
  int64_t out = 0;
  bool bias = false;
  // For the weight's first values; the bias begins with 0.
  double standard_deviation = 0.02;
  ProjectionCut cut = ProjectionCut::kNone;
  // Sections of the outputs, each shared by the ranks by itself: sizes whose sum is `out`; none:
  // one.
  std::vector<int64_t> sections = {};
};

// One of an adapter's two matrices. Not quantised, and never Muon's.
class AdapterMatrixImpl : public torch::nn::Module, public NamedInit {
 public:
  // First values: uniform from -bound to bound.
  AdapterMatrixImpl(int64_t rows, int64_t columns, double bound);
  void reset_parameters() override;

  at::Tensor weight;

 private:
  const double bound_;
};
TORCH_MODULE(AdapterMatrix);

struct Adapter {
  AdapterMatrix a{nullptr};  // [rank, in]; empty: there is no adapter
  AdapterMatrix b{nullptr};  // [out, rank]
  double scale = 0;
};

// x * weight^T + bias, like fsdp::nn::Linear; with an adapter (LoraOptions) also scale * B (A x).
class ProjectionImpl : public torch::nn::Module,
                       public NamedInit,
                       public TokenParallelLayer,
                       public QuantizableModule,
                       public MatrixModule {
 public:
  explicit ProjectionImpl(const ProjectionOptions& options);
  at::Tensor forward(const at::Tensor& input);
  void reset_parameters() override;
  TpPlacement tp_placement(const std::string& parameter) const override;
  bool is_quantizable(const std::string& parameter) const override {
    return parameter == "weight" && fsdp::is_quantizable(weight.size(0), weight.size(1));
  }
  std::vector<int64_t> matrix_rows(const std::string& parameter) const override;
  // UsageError with an adapter, whose matrices nobody cuts.
  void join(const MeshAxis& tp) override;

  // Before first values are set. The first ones are PEFT's: those of torch::nn::Linear in A, and 0
  // in B.
  void add_adapter(int64_t rank, double scale);

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out], or undefined
  Adapter adapter;

 private:
  const double standard_deviation_;
  const ProjectionCut cut_;
  const std::vector<int64_t> sections_;
};
TORCH_MODULE(Projection);

// Several projections of one input; with ranks, which share their outputs
// (ProjectionCut::kOutputs), from this rank's tokens to some outputs of all.
std::vector<at::Tensor> project(const at::Tensor& input, const std::vector<Projection>& layers,
                                const MeshAxis* tp = nullptr);

// --- embedding -----------------------------------------------------------------------------------

// Where the ranks of a tp group can share the vocabulary evenly, each has the rows of its part, in
// the embedding and in the head; else all.
inline const TpShard kByVocabulary{.dim = 0, .partial_if_uneven = true};

class EmbeddingImpl : public torch::nn::Module, public NamedInit, public TokenParallelLayer {
 public:
  EmbeddingImpl(int64_t vocab_size, int64_t hidden_size, double standard_deviation);
  // [batch, sequence] to this rank's tokens, [batch, sequence / tp, hidden_size].
  at::Tensor forward(const at::Tensor& tokens);
  void reset_parameters() override;
  TpPlacement tp_placement(const std::string&) const override { return kByVocabulary; }
  void join(const MeshAxis& tp) override;

  at::Tensor weight;  // [vocab_size, hidden_size]

 private:
  at::Tensor of_own_rows(const at::Tensor& tokens) const;

  bool has_own_rows_ = false;
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
  NormWeight norm_weight = NormWeight::kFactor;
  double standard_deviation = 0.02;
  // The embedding's weight, if it is also the output matrix.
  at::Tensor tied_weight = {};
  int64_t logit_bytes = kDefaultLogitBytes;  // BuildOptions
};

class HeadImpl : public torch::nn::Module, public NamedInit, public TokenParallelLayer {
 public:
  explicit HeadImpl(const HeadOptions& options);
  // With targets, [batch, sequence] of all ranks: head_loss(). Without: logits, [batch, sequence,
  // vocab_size], or the part of them that ranks() tells.
  at::Tensor forward(const at::Tensor& x, HeadInput input, const at::Tensor& targets = {});
  const LogitRanks& ranks() const { return ranks_; }
  void reset_parameters() override;
  TpPlacement tp_placement(const std::string&) const override { return kByVocabulary; }
  void join(const MeshAxis& tp) override;

  at::Tensor weight;

 private:
  const bool is_tied_;
  const double standard_deviation_;
  const int64_t logit_bytes_;
  RmsNorm norm_;
  LogitRanks ranks_;
};
TORCH_MODULE(Head);

}  // namespace fsdp::nn
