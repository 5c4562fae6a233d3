#include "fsdp/train/run_options.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/muon.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/train/environment.h"
#include "fsdp/train/peak_rates.h"

namespace fsdp::train {

namespace {

std::optional<at::ScalarType> scalar_type(const std::optional<DType>& dtype) {
  return dtype ? std::optional(scalar_type_of(*dtype)) : std::nullopt;
}

// 0 where this libtorch was built without CUDA.
int num_cuda_devices() {
  return at::hasCUDA() ? c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() : 0;
}

// The type in which libtorch multiplies such matrices on a GPU.
std::optional<ProductType> product_type(DType compute) {
  if (compute == DType::kBFloat16) return ProductType::kBFloat16;
  if (compute == DType::kFloat16) return ProductType::kFloat16;
  if (compute != DType::kFloat32) return std::nullopt;
  return at::globalContext().allowTF32CuBLAS() ? ProductType::kTensorFloat32
                                               : ProductType::kFloat32;
}

StepOptions step_options(const TrainOptions& o) {
  return {.max_norm = o.clip,
          .measures_norm = true,
          .on_nonfinite =
              o.on_nonfinite == NonfiniteChoice::kSkip ? OnNonfinite::kSkip : OnNonfinite::kUpdate,
          .loss_scale = o.dynamic_loss_scale ? LossScale::dynamic(o.loss_scale)
                                             : LossScale::fixed(o.loss_scale),
          .updates = o.updates == UpdatesChoice::kHidden ? Updates::kHidden : Updates::kBlocking,
          .rounding = o.rounding,
          .seed = o.seed,
          .marks_changes = !o.patches.empty()};
}

}  // namespace

c10::Device training_device(const TrainOptions& options, int local_rank) {
  if (options.device == DeviceChoice::kCpu) return c10::kCPU;
  const int devices = num_cuda_devices();
  if (devices == 0) {
    if (options.cuda_graph)
      throw UsageError("--cuda-graph records what a GPU does, and there is none here; drop it");
    if (options.device == DeviceChoice::kAuto) return c10::kCPU;
    throw UsageError(
        "--device is cuda, but there is no GPU here (or this libtorch was built "
        "without CUDA); use --device cpu");
  }
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(gpu_of_rank(local_rank, devices))};
}

RanksHere ranks_here(const Launch& launch, int64_t num_ranks, c10::Device device) {
  // Threads of one process share its device.
  if (launch.size == 1) return {.of_host = num_ranks, .of_device = num_ranks};
  // Before the ranks have met, those that see one GPU each cannot be told from those that share
  // one.
  const int64_t devices = device.is_cpu() ? 1 : num_cuda_devices();
  return {.of_host = launch.local_size,
          .of_device = launch.gpu_ranks > 0 && !device.is_cpu()
                           ? launch.gpu_ranks
                           : ceil_div(launch.local_size, devices)};
}

DType compute_dtype(const TrainOptions& options, c10::Device device) {
  if (options.compute) return *options.compute;
  return device.is_cpu() ? DType::kFloat32 : DType::kBFloat16;
}

std::string slow_compute_text(DType compute, c10::Device device, const CpuTypes& cpu) {
  if (!device.is_cpu() || is_quick_on(cpu, compute)) return "";
  return concat("--compute is ", name_of(compute),
                ", for which libtorch has no quick products on this CPU: they are up to 300 times "
                "slower than in fp32; use --compute fp32 here");
}

RankDevice rank_device(const TrainOptions& options, c10::Device device) {
  RankDevice found{.device = device.is_cpu() ? DeviceChoice::kCpu : DeviceChoice::kCuda,
                   .compute = compute_dtype(options, device)};
  const std::optional<ProductType> products = product_type(found.compute);
  if (products) found.peak_tflops = known_peak_tflops(device_name(device), *products).value_or(0);
  return found;
}

CommOptions comm_options(const TrainOptions& options) {
  CommOptions comm = CommOptions::from_environment();
  const bool is_given = options.timeout != TrainOptions{}.timeout;
  if (is_given) comm.timeout_seconds = options.timeout;
  if (is_given || !env_text("FSDP_TIMEOUT_S")) comm.timeout_name = "--timeout";
  comm.checked |= options.checked;
  if (options.device == DeviceChoice::kCpu) comm.nccl = NcclUse::kOff;
  return comm;
}

ShardOptions shard_options(const TrainOptions& o, c10::Device device) {
  ShardOptions shard;
  shard.strategy = o.strategy;
  shard.precision = {.main_params = scalar_type(o.precision.main_params),
                     .main_storage = o.precision.main_storage,
                     .main_grads = scalar_type(o.precision.main_grads),
                     .grad_comm = scalar_type(o.precision.grad_comm)};
  shard.quantization = {.recipe = o.weights,
                        .except = o.weights_except,
                        .scaling = o.weights_scaling,
                        .weight_gradient = o.weights_gradient};
  shard.pool = o.pool;
  shard.prefetch = static_cast<int32_t>(o.prefetch);
  shard.pool_budget_bytes = o.pool_budget_bytes;
  shard.on_move = o.on_move;
  shard.other_units = o.other_units;
  shard.user_buffers = o.user_buffers;
  shard.gradient_lifetime = o.gradient_lifetime == LifetimeChoice::kStep
                                ? GradientLifetime::kStep
                                : GradientLifetime::kPersistent;
  shard.offload = {.fraction = o.offload,
                   .pin = o.offload_pin,
                   .overlap = o.offload_overlap,
                   .chunk_numel = o.offload_chunk};
  shard.report_nan = o.name_nan ? ReportNan::kPerParameter : ReportNan::kOff;
  shard.granularity = o.granularity;
  if (o.optimizer == OptimizerChoice::kMuon)
    shard.matrices = {.declared = true, .except = o.muon_except};
  shard.device = device;
  shard.validate();
  return shard;
}

std::unique_ptr<Optimizer> make_optimizer(const TrainOptions& o, const Sharded& sharded) {
  switch (o.optimizer) {
    case OptimizerChoice::kAdamW:
      return std::make_unique<AdamW>(
          sharded, AdamWOptions{.lr = o.lr,
                                .beta1 = o.beta1,
                                .beta2 = o.beta2,
                                .eps = o.eps,
                                .weight_decay = o.weight_decay,
                                .decay_spares_vectors = !o.decay_vectors,
                                .rules = o.rules,
                                .first_moment = scalar_type_of(*o.precision.first_moment),
                                .second_moment = scalar_type_of(*o.precision.second_moment),
                                .step = step_options(o)});
    case OptimizerChoice::kSgd:
      return std::make_unique<SGD>(
          sharded, SGDOptions{.lr = o.lr,
                              .momentum = o.momentum,
                              .nesterov = o.nesterov,
                              .weight_decay = o.weight_decay,
                              .decay_spares_vectors = !o.decay_vectors,
                              .rules = o.rules,
                              .momentum_dtype = scalar_type_of(*o.precision.first_moment),
                              .step = step_options(o)});
    case OptimizerChoice::kMuon:
      return std::make_unique<Muon>(
          sharded,
          MuonOptions{.lr = o.lr,
                      .adamw_rate_scale = o.adamw_rate,
                      .momentum = o.muon_momentum,
                      .scale = o.muon_scale == MuonScaleChoice::kOriginal ? MuonScale::kOriginal
                                                                          : MuonScale::kMatchAdamW,
                      .weight_decay = o.weight_decay,
                      .decay_spares_vectors = !o.decay_vectors,
                      .rules = o.rules,
                      .momentum_dtype = scalar_type_of(*o.precision.first_moment),
                      .beta1 = o.beta1,
                      .beta2 = o.beta2,
                      .eps = o.eps,
                      .first_moment = scalar_type_of(*o.precision.first_moment),
                      .second_moment = scalar_type_of(*o.precision.second_moment),
                      .step = step_options(o)});
  }
  FSDP_ASSERT(false, "no such optimizer");
}

CheckpointerOptions checkpointer_options(const TrainOptions& o, const NameRules& names) {
  CheckpointerOptions options;
  options.mode = o.save == SaveChoice::kBackground ? SaveMode::kBackground : SaveMode::kBlocking;
  options.keep = {.keep_last = o.keep_last, .keep_every = o.keep_every};
  options.form = {.names = names, .model_dtype = o.checkpoint_dtype};
  options.write.chunk_bytes = o.write_chunk_bytes;
  return options;
}

ExportOptions export_options(const TrainOptions& o, const NameRules& names) {
  return {.form = {.names = names, .model_dtype = std::nullopt},
          .chunk_bytes = o.write_chunk_bytes};
}

LoadOptions load_options(const TrainOptions& o, const NameRules& names) {
  LoadOptions options;
  options.names = names;
  options.allow_missing = o.allow_missing;
  options.extra = o.allow_extra ? LoadOptions::Extra::kAllow : LoadOptions::Extra::kRefuse;
  options.chunk_bytes = o.load_chunk_bytes;
  options.read.threads = static_cast<int>(o.read_threads);
  return options;
}

}  // namespace fsdp::train
