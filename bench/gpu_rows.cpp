#include "gpu_rows.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/world.h"
#include "fsdp/graph/device_graph.h"
#include "fsdp/graph/graph.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/muon.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"

namespace bench {

namespace {

constexpr uint64_t kSeed = 1;

at::Tensor loss_on(c10::Device device) {
  return at::zeros({}, at::device(device).dtype(at::kFloat));
}

fsdp::BuildOptions build_options(const RowSetup& setup) {
  return {.seed = kSeed, .dtype = setup.compute};
}

// --- unsharded -----------------------------------------------------------------------------------

// libtorch's fused AdamW over tensors of one type, as Python's torch.optim.AdamW(fused=True) calls
// it.
class FusedAdamW {
 public:
  FusedAdamW(const std::vector<at::Tensor>& weights, const AdamWRates& rates) : rates_(rates) {
    for (const at::Tensor& weight : weights) {
      firsts_.push_back(at::zeros_like(weight));
      seconds_.push_back(at::zeros_like(weight));
      steps_.push_back(at::zeros({}, weight.options().dtype(at::kFloat)));
    }
  }

  void update(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients) {
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(weights, gradients, firsts_, seconds_, /*max_exp_avg_sqs=*/{}, steps_,
                      rates_.lr, rates_.beta1, rates_.beta2, rates_.weight_decay, rates_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }

 private:
  const AdamWRates rates_;
  std::vector<at::Tensor> firsts_;
  std::vector<at::Tensor> seconds_;
  std::vector<at::Tensor> steps_;
};

// The two unsharded rows share the model, and its gradients as autograd leaves them.
class Plain : public Trainee {
 public:
  explicit Plain(const RowSetup& setup)
      : Trainee(loss_on(setup.device)),
        model_(fsdp::build_language_model(setup.config, build_options(setup))) {
    model_->to(setup.device);
    parameters_ = model_->parameters();
    for (const at::Tensor& parameter : parameters_) weights_.push_back(parameter.detach());
  }

 protected:
  void compute(const Batch& batch) {
    const at::Tensor loss = model_->loss(batch.tokens, batch.targets).total;
    loss.backward();
    loss_.copy_(loss.detach());
    gradients_.clear();
    for (const at::Tensor& parameter : parameters_) gradients_.push_back(parameter.grad());
  }

  void drop_gradients() {
    gradients_.clear();
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  }

  const std::shared_ptr<fsdp::LanguageModel> model_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> weights_;    // the same without autograd
  std::vector<at::Tensor> gradients_;  // between compute() and drop_gradients()
};

// Everything in bf16: fewer bytes than any careful training, and the goal to come near.
class PlainBf16 final : public Plain {
 public:
  explicit PlainBf16(const RowSetup& setup) : Plain(setup), optimizer_(weights_, setup.rates) {}

  void step(const Batch& batch) override {
    compute(batch);
    optimizer_.update(weights_, gradients_);
    drop_gradients();
  }

 private:
  FusedAdamW optimizer_;
};

// The types of the sharded rows, as a careful user would write it: a handful of launches each for
// the cast of gradients, the update and the cast of weights.
class PlainSame final : public Plain {
 public:
  explicit PlainSame(const RowSetup& setup)
      : Plain(setup), main_weights_(copies(weights_)), optimizer_(main_weights_, setup.rates) {
    for (const at::Tensor& weight : main_weights_)
      main_gradients_.push_back(at::empty_like(weight));
  }

  void step(const Batch& batch) override {
    compute(batch);
    at::_foreach_copy_(main_gradients_, gradients_);
    drop_gradients();
    optimizer_.update(main_weights_, main_gradients_);
    at::_foreach_copy_(weights_, main_weights_);
  }

 private:
  static std::vector<at::Tensor> copies(const std::vector<at::Tensor>& weights) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& weight : weights)
      result.push_back(weight.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    return result;
  }

  std::vector<at::Tensor> main_weights_;
  std::vector<at::Tensor> main_gradients_;
  FusedAdamW optimizer_;
};

// A step that is recorded after a few eager ones, as fsdp::Graph does it for sharded models.
class Recorded final : public Trainee {
 public:
  Recorded(c10::Device device, std::unique_ptr<Trainee> eager)
      : Trainee(eager->loss()),
        device_(device),
        eager_(std::move(eager)),
        graph_(fsdp::make_device_graph(device)),
        stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

  void step(const Batch& batch) override {
    const c10::Stream caller = fsdp::current_stream(device_);
    fsdp::follow(stream_, caller);
    {
      const c10::StreamGuard on_stream(stream_);
      if (num_steps_ < kEagerSteps) {
        eager_->step(batch);
      } else {
        if (num_steps_ == kEagerSteps) {
          graph_->begin({});
          eager_->step(batch);
          graph_->end();
        }
        graph_->replay();
      }
    }
    ++num_steps_;
    fsdp::follow(caller, stream_);
  }

 private:
  static constexpr int64_t kEagerSteps = 3;

  const c10::Device device_;
  const std::unique_ptr<Trainee> eager_;
  const std::unique_ptr<fsdp::DeviceGraph> graph_;
  const c10::Stream stream_;
  int64_t num_steps_ = 0;
};

// --- sharded -------------------------------------------------------------------------------------

// The peers use NCCL though there is one rank, so these do, too.
fsdp::CommOptions comm_options(c10::Device device, fsdp::Collectives collectives) {
  fsdp::CommOptions options = fsdp::CommOptions::from_environment();
  if (!device.is_cpu() && collectives == fsdp::Collectives::kAlways)
    options.nccl = fsdp::NcclUse::kAlways;
  return options;
}

class ShardedTrainee final : public Trainee {
 public:
  ShardedTrainee(const RowSetup& setup, fsdp::ShardOptions options, Launch launch)
      : Trainee(loss_on(setup.device)),
        launch_(launch),
        world_(fsdp::World::from_environment(comm_options(setup.device, options.collectives))),
        mesh_(world_.mesh()) {
    FSDP_CHECK(world_.size() == 1, "bench_gpu measures one rank, and this job has ", world_.size());
    {
      const fsdp::MetaConstruction meta;
      model_ = fsdp::build_language_model(setup.config, build_options(setup));
    }
    options.precision.main_params = at::kFloat;
    options.precision.main_grads = at::kFloat;
    options.device = setup.device;
    sharded_.emplace(
        fsdp::fully_shard(std::static_pointer_cast<torch::nn::Module>(model_), mesh_, options));
    optimizer_ = make_optimizer(setup, options);
  }

  void step(const Batch& batch) override {
    if (launch_ == Launch::kEager) return train(batch);
    if (!graph_)
      graph_ = std::make_unique<fsdp::Graph>(*sharded_, optimizer_.get(),
                                             [this, batch] { train(batch); });
    graph_->run();
  }

  void finish() override { optimizer_->wait(); }

 private:
  // Other rows decay vectors, too.
  std::unique_ptr<fsdp::Optimizer> make_optimizer(const RowSetup& setup,
                                                  const fsdp::ShardOptions& options) const {
    const AdamWRates& rates = setup.rates;
    if (options.matrices.declared)
      return std::make_unique<fsdp::Muon>(*sharded_,
                                          fsdp::MuonOptions{.lr = rates.lr,
                                                            .weight_decay = rates.weight_decay,
                                                            .decay_spares_vectors = false,
                                                            .beta1 = rates.beta1,
                                                            .beta2 = rates.beta2,
                                                            .eps = rates.eps});
    return std::make_unique<fsdp::AdamW>(*sharded_,
                                         fsdp::AdamWOptions{.lr = rates.lr,
                                                            .beta1 = rates.beta1,
                                                            .beta2 = rates.beta2,
                                                            .eps = rates.eps,
                                                            .weight_decay = rates.weight_decay,
                                                            .decay_spares_vectors = false});
  }

  void train(const Batch& batch) {
    const at::Tensor loss = model_->loss(batch.tokens, batch.targets).total;
    loss.backward();
    loss_.copy_(loss.detach());
    optimizer_->step();
    optimizer_->zero_grad();
  }

  const Launch launch_;
  fsdp::World world_;
  const fsdp::Mesh mesh_;
  std::shared_ptr<fsdp::LanguageModel> model_;
  std::optional<fsdp::Sharded> sharded_;
  std::unique_ptr<fsdp::Optimizer> optimizer_;
  std::unique_ptr<fsdp::Graph> graph_;
};

// --- the table -----------------------------------------------------------------------------------

template <typename Kind>
std::unique_ptr<Trainee> make_plain(const RowSetup& setup) {
  return std::make_unique<Kind>(setup);
}

template <typename Kind>
std::unique_ptr<Trainee> make_recorded(const RowSetup& setup) {
  return std::make_unique<Recorded>(setup.device, std::make_unique<Kind>(setup));
}

// Gradients live for a step, as the peers' do, or keep their memory.
template <fsdp::Collectives kCollectives, Launch kLaunch,
          fsdp::GradientLifetime kLifetime = fsdp::GradientLifetime::kStep>
std::unique_ptr<Trainee> make_sharded(const RowSetup& setup) {
  return std::make_unique<ShardedTrainee>(
      setup, fsdp::ShardOptions{.gradient_lifetime = kLifetime, .collectives = kCollectives},
      kLaunch);
}

// The last kPercent percent of every shard's main weights and moments live on the host.
template <int kPercent>
std::unique_ptr<Trainee> make_offloaded(const RowSetup& setup) {
  fsdp::ShardOptions options{.gradient_lifetime = fsdp::GradientLifetime::kStep};
  options.offload.fraction = kPercent / 100.0;
  if (setup.offload_chunk > 0) options.offload.chunk_numel = setup.offload_chunk;
  return std::make_unique<ShardedTrainee>(setup, options, Launch::kEager);
}

template <Launch kLaunch>
std::unique_ptr<Trainee> make_muon(const RowSetup& setup) {
  fsdp::ShardOptions options{.gradient_lifetime = fsdp::GradientLifetime::kStep};
  options.matrices.declared = true;
  return std::make_unique<ShardedTrainee>(setup, options, kLaunch);
}

template <fsdp::WeightRecipe kRecipe, Launch kLaunch>
std::unique_ptr<Trainee> make_quantized(const RowSetup& setup) {
  fsdp::ShardOptions options{.gradient_lifetime = fsdp::GradientLifetime::kStep};
  options.quantization.recipe = kRecipe;
  return std::make_unique<ShardedTrainee>(setup, options, kLaunch);
}

using fsdp::Collectives;
using fsdp::WeightRecipe;

constexpr std::array kRows = {
    Row{"plain-bf16", "unsharded; weights, gradients and moments in bf16", Launch::kEager,
        &make_plain<PlainBf16>},
    Row{"plain-same", "unsharded; bf16 weights, fp32 main weights, gradients and moments",
        Launch::kEager, &make_plain<PlainSame>},
    Row{"plain-same-graph", "plain-same, recorded and replayed", Launch::kGraph,
        &make_recorded<PlainSame>},
    Row{"ours", "fully_shard, one rank: nothing travels", Launch::kEager,
        &make_sharded<Collectives::kBetweenRanks, Launch::kEager>},
    Row{"ours-graph", "ours, recorded and replayed", Launch::kGraph,
        &make_sharded<Collectives::kBetweenRanks, Launch::kGraph>},
    Row{"ours-collectives", "ours, with every collective issued through NCCL", Launch::kEager,
        &make_sharded<Collectives::kAlways, Launch::kEager>},
    Row{"ours-collectives-graph", "the same, recorded and replayed", Launch::kGraph,
        &make_sharded<Collectives::kAlways, Launch::kGraph>},
    Row{"ours-persistent", "ours, with gradients that keep their memory", Launch::kEager,
        &make_sharded<Collectives::kBetweenRanks, Launch::kEager,
                      fsdp::GradientLifetime::kPersistent>},
    Row{"ours-offload-50", "ours, with half of main weights and moments on the host",
        Launch::kEager, &make_offloaded<50>},
    Row{"ours-offload-100", "ours, with all main weights and moments on the host", Launch::kEager,
        &make_offloaded<100>},
    Row{"ours-muon", "ours, with Muon for the matrices of hidden layers", Launch::kEager,
        &make_muon<Launch::kEager>},
    Row{"ours-muon-graph", "the same, recorded and replayed", Launch::kGraph,
        &make_muon<Launch::kGraph>},
    Row{"ours-fp8-row", "ours, with matrices in fp8, a scale for each row", Launch::kEager,
        &make_quantized<WeightRecipe::kFp8Row, Launch::kEager>},
    Row{"ours-fp8-row-graph", "the same, recorded and replayed", Launch::kGraph,
        &make_quantized<WeightRecipe::kFp8Row, Launch::kGraph>},
    Row{"ours-fp8-tensor", "ours, with matrices in fp8, a scale for each matrix", Launch::kEager,
        &make_quantized<WeightRecipe::kFp8Tensor, Launch::kEager>},
};

}  // namespace

std::span<const Row> rows() { return kRows; }

const Row& find_row(std::string_view name) {
  std::vector<std::string> names;
  for (const Row& row : kRows) {
    if (row.name == name) return row;
    names.emplace_back(row.name);
  }
  throw fsdp::UsageError(
      fsdp::concat("--rows has '", name, "'; there are ", fsdp::join(names, ", ")));
}

int64_t num_units(const fsdp::ModelConfig& config) {
  const auto* llama = std::get_if<fsdp::LlamaConfig>(&config);
  FSDP_CHECK(llama != nullptr, "only models of the Llama family are compared");
  return llama->num_hidden_layers + 2;
}

}  // namespace bench
