// Ranks that NCCL connects, as processes on one GPU, and a small model they train.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "fsdp/comm/backends.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "support/process_world.h"
#include "support/small_models.h"

namespace fsdp::testing {

inline const at::Device kGpu(at::kCUDA, 0);

inline World world_over_nccl(const CommOptions& options) {
  const Launch launch = read_launch();
  return World(launch, over_nccl(connect_processes(options), launch.local_rank, options));
}

struct SmallOptions {
  std::string strategy = "optim_grads_params";
  UserBuffers user_buffers = UserBuffers::kOff;
  at::ScalarType wire = at::kFloat;
  at::ScalarType compute = at::kBFloat16;
  PoolKind pool = PoolKind::kMaxPool;
  ModelConfig config = small_llama();
};

// A small model and its optimizer. step() is the same work every time, for graphs.
class SmallTraining {
 public:
  SmallTraining(const Mesh& mesh, const SmallOptions& options)
      : loss_number_(mesh.data_parallel_rank()),
        model_(build_language_model(options.config, {.seed = 3, .dtype = options.compute})),
        sharded_(shard(mesh, options)),
        optimizer_(sharded_, {.lr = 1e-2, .step = {.max_norm = 0.5}}),
        tokens_(small_tokens(0, 0, 2, kSequence).to(kGpu)) {}

  void begin_step(int number) {
    tokens_.copy_(small_tokens(loss_number_, number % 3, 2, kSequence));
    optimizer_.set_learning_rate(1e-2 / (1 + number));
  }

  void step() {
    const int64_t length = tokens_.size(1) - 1;
    const at::Tensor total =
        model_->loss(tokens_.narrow(1, 0, length), tokens_.narrow(1, 1, length)).total;
    total.backward();
    loss_ = total.detach();
    optimizer_.step();
    optimizer_.zero_grad();
  }

  double loss() const { return loss_.item<double>(); }
  // On other tokens, between steps.
  double validate() {
    const at::NoGradGuard no_grad;
    return model_->logits(small_tokens(7, 7).to(kGpu)).sum().item<double>();
  }
  LanguageModel& model() { return *model_; }
  const Sharded& sharded() const { return sharded_; }
  AdamW& optimizer() { return optimizer_; }

 private:
  // Issues collectives even with one rank.
  Sharded shard(const Mesh& mesh, const SmallOptions& options) {
    model_->to(kGpu);
    return fully_shard(model_, mesh,
                       {.strategy = parse_strategy(options.strategy),
                        .precision = {.main_grads = at::kFloat, .grad_comm = options.wire},
                        .pool = options.pool,
                        .user_buffers = options.user_buffers,
                        .collectives = Collectives::kAlways});
  }

  static constexpr int64_t kSequence = 8;  // which two ranks can share

  const int loss_number_;
  const std::shared_ptr<LanguageModel> model_;
  const Sharded sharded_;
  AdamW optimizer_;
  const at::Tensor tokens_;
  at::Tensor loss_;
};

}  // namespace fsdp::testing
