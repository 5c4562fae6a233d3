// One rank's training of a Llama, or of another model, on the GPU, on a stream of its own, for
// tests of time and memory.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "fsdp/comm/world.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"

namespace fsdp::testing {

// Wide enough that the device, not the host, takes the time of a step; units of less than 2^24
// elements, so that every reduction is one piece (comm/nccl/nccl_communicator.cpp).
inline LlamaConfig wide_llama() {
  return {.vocab_size = 8192,
          .hidden_size = 1024,
          .num_hidden_layers = 4,
          .num_attention_heads = 16,
          .num_key_value_heads = 4,
          .intermediate_size = 2816,
          .max_position_embeddings = 4096};
}

struct TrainingShape {
  ModelConfig config = wide_llama();
  int64_t rows = 2;
  int64_t sequence = 64;
  int microbatches = 1;
  Recompute recompute = Recompute::kNone;
};

// Main gradients are fp32. Makes its own stream the caller's current one.
class LlamaTraining {
 public:
  LlamaTraining(World& world, ShardOptions options, const TrainingShape& shape)
      : device_(at::kCUDA, 0),
        stream_(c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(device_)),
        on_stream_(stream_),
        mesh_(world.mesh()),
        microbatches_(shape.microbatches) {
    {
      const MetaConstruction meta;
      model_ = build_language_model(
          shape.config, {.seed = 3, .recompute = shape.recompute, .dtype = at::kBFloat16});
    }
    options.precision.main_grads = at::kFloat;
    options.device = device_;
    sharded_.emplace(
        fully_shard(std::static_pointer_cast<torch::nn::Module>(model_), mesh_, options));
    optimizer_ =
        std::make_unique<AdamW>(*sharded_, AdamWOptions{.lr = 1e-3, .step = {.max_norm = 1.0}});
    const at::Tensor index = at::arange(shape.rows * (shape.sequence + 1), at::kLong);
    const at::Tensor text = (index * index * 3 + index * 5 + 11 * world.rank())
                                .remainder(vocab_size_of(shape.config))
                                .view({shape.rows, -1})
                                .to(device_);
    tokens_ = text.narrow(1, 0, shape.sequence).contiguous();
    targets_ = text.narrow(1, 1, shape.sequence).contiguous();
  }

  void step() {
    for (int part = 0; part < microbatches_; ++part) {
      sharded_->microbatch({.last = part + 1 == microbatches_});
      model_->loss(tokens_, targets_).total.backward();
    }
    optimizer_->step();
    optimizer_->zero_grad();
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }

  LanguageModel& model() { return *model_; }
  const Sharded& sharded() const { return *sharded_; }
  AdamW& optimizer() { return *optimizer_; }
  int64_t num_units() const { return static_cast<int64_t>(sharded_->unit_names().size()); }
  const at::Tensor& tokens() const { return tokens_; }

  // Waits until the device has done everything.
  void finish() const { c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(device_.index()); }

 private:
  const c10::Device device_;
  const c10::Stream stream_;
  const c10::StreamGuard on_stream_;
  const Mesh mesh_;
  const int microbatches_;
  std::shared_ptr<LanguageModel> model_;
  std::optional<Sharded> sharded_;
  std::unique_ptr<AdamW> optimizer_;
  at::Tensor tokens_;
  at::Tensor targets_;
};

}  // namespace fsdp::testing
