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

namespace fsdp::train {

namespace {

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
  StepOptions step = o.step;
  step.seed = o.build.seed;
  step.marks_changes = !o.patches.empty();
  return step;
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

RankDevice rank_device(const TrainOptions& options, c10::Device device, const RanksHere& ranks) {
  RankDevice found{.device = device.is_cpu() ? DeviceChoice::kCpu : DeviceChoice::kCuda,
                   .compute = compute_dtype(options, device),
                   .memory_bytes = device_memory_bytes(device) / ranks.of_device};
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
  ShardOptions shard = o.shard;
  shard.matrices.declared = o.optimizer == OptimizerChoice::kMuon;
  shard.quantization.frozen = o.build.lora.is_on();
  shard.device = device;
  shard.validate();
  return shard;
}

std::unique_ptr<Optimizer> make_optimizer(const TrainOptions& o, const Sharded& sharded) {
  const at::ScalarType first = scalar_type_of(*o.moments.first);
  const at::ScalarType second = scalar_type_of(*o.moments.second);
  switch (o.optimizer) {
    case OptimizerChoice::kAdamW:
      return std::make_unique<AdamW>(sharded, AdamWOptions{.lr = o.rate(),
                                                           .beta1 = o.beta1,
                                                           .beta2 = o.beta2,
                                                           .eps = o.eps,
                                                           .weight_decay = o.weight_decay,
                                                           .rules = o.rules,
                                                           .first_moment = first,
                                                           .second_moment = second,
                                                           .step = step_options(o)});
    case OptimizerChoice::kSgd:
      return std::make_unique<SGD>(sharded, SGDOptions{.lr = o.rate(),
                                                       .momentum = o.sgd_momentum(),
                                                       .nesterov = o.nesterov,
                                                       .weight_decay = o.weight_decay,
                                                       .rules = o.rules,
                                                       .momentum_dtype = first,
                                                       .step = step_options(o)});
    case OptimizerChoice::kMuon:
      return std::make_unique<Muon>(sharded, MuonOptions{.lr = o.rate(),
                                                         .adamw_rate_scale = o.adamw_rate,
                                                         .momentum = o.muon_momentum(),
                                                         .scale = o.muon_scale,
                                                         .weight_decay = o.weight_decay,
                                                         .rules = o.rules,
                                                         .momentum_dtype = first,
                                                         .beta1 = o.beta1,
                                                         .beta2 = o.beta2,
                                                         .eps = o.eps,
                                                         .first_moment = first,
                                                         .second_moment = second,
                                                         .step = step_options(o)});
  }
  FSDP_ASSERT(false, "no such optimizer");
}

}  // namespace fsdp::train
