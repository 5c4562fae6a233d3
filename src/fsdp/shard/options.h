// What a user decides when a model is sharded.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "fsdp/comm/user_buffers.h"
#include "fsdp/layout/granularity.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/gradient_lifetime.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

// The types of the buffers beside the weights, which keep the parameters' own dtype (convert the
// model before sharding it: `model->to(torch::kBFloat16)`).
struct PrecisionPolicy {
  // Main weights: what the optimizer updates. Equal to the parameters' dtype: the weights
  // themselves, never a second copy. nullopt: the same.
  std::optional<at::ScalarType> main_params = at::kFloat;

  // How main weights are stored. kSplit: fp32 main weights of bf16 parameters are those parameters
  // and 16 bits beside them, 4 bytes together instead of 6; the same numbers. Other pairs of types
  // are separate in any case. kSeparate: for optimizers of your own, which change main weights in
  // place (Sharded::flat_shards).
  MainStorage main_storage = MainStorage::kSplit;

  // Main gradients: what microbatches add up in, and what the optimizer reads. nullopt: the
  // parameters' dtype.
  std::optional<at::ScalarType> main_grads = std::nullopt;

  // What gradients travel in. Sums over ranks are wide whatever travels (docs/communication.md).
  // nullopt: the main gradients' dtype. The one field that set_precision() can change later.
  std::optional<at::ScalarType> grad_comm = std::nullopt;

  // The same without torch, for layouts and forecasts.
  PrecisionTypes types() const;

  friend bool operator==(const PrecisionPolicy&, const PrecisionPolicy&) = default;
};

// What a gradient is when every rank computed its own loss.
enum class GradientOf : uint8_t {
  kMeanOverRanks,  // each rank's loss is a mean over its tokens: sum over ranks / ranks
  kSumOverRanks,   // each rank's loss is already divided by all tokens of all ranks: the sum
};

enum class ReportNan : uint8_t {
  kOff,           // found_nonfinite() after the step still says whether there was one
  kPerParameter,  // an Error that names parameter, rank and microbatch, before it reaches the wire;
                  // costs a pass over every gradient and, on a device, a host wait each
};

// When ranks exchange weights and gradients.
enum class Collectives : uint8_t {
  kBetweenRanks,  // one rank has everything and exchanges nothing
  kAlways,        // one rank, too: gathers and reductions are really issued, to measure them
};

// Whose parameter values a model begins with.
enum class InitialValues : uint8_t {
  kOfEveryRank,  // every rank built the same (from the same seed or file); checked, an Error if not
  kOfRankZero,   // rank 0's, sent to the others; what they built is dropped
};

// Optimizer state that lives in the host's memory and is updated there.
struct Offload {
  // Of every shard's elements: 0 none, 1 all; exact to one element.
  double fraction = 0.0;

  // Page-locked memory, which a device reads and writes by itself.
  bool pin = true;

  // Chunks travel while others are updated, and the next forward does not wait for them all. Off:
  // step() returns when everything is done.
  bool overlap = true;

  // Elements that travel together.
  int64_t chunk_numel = 1 << 20;

  friend bool operator==(const Offload&, const Offload&) = default;
};

struct ShardOptions {
  // What is sharded: a row of the table in layout/strategy.h, or any legal placements.
  Strategy strategy = Strategy::optim_grads_params;

  // Types of main weights, main gradients and gradient communication.
  PrecisionPolicy precision = {};

  // Where gathered weights and unreduced gradients live (docs/memory.md).
  PoolKind pool = PoolKind::kMaxPool;

  // Units gathered ahead of the one that computes; 1 means two units are live.
  int32_t prefetch = 1;

  // Gather as far ahead as the pool can within this many bytes; 0: as `prefetch` says.
  int64_t budget_bytes = 0;

  // Pools with slots: a step in another order than the first one finds its slot taken.
  OnMove on_move = OnMove::kFollow;

  // Pool `double_buffer`: units that are not like the most common one.
  OtherUnits other_units = OtherUnits::kOnDemand;

  // Whether NCCL allocates the memory that collectives touch and uses it in place (docs/gpu.md);
  // registered after the first step.
  UserBuffers user_buffers = UserBuffers::kOff;

  // What ranks' gradients become.
  GradientOf gradient = GradientOf::kMeanOverRanks;

  // How long main gradients own memory.
  GradientLifetime gradient_lifetime = GradientLifetime::kPersistent;

  // How much of the optimizer's state (moments and main weights) lives on the host.
  Offload offload = {};

  // Whether NaN and Inf are searched parameter by parameter.
  ReportNan report_nan = ReportNan::kOff;

  // Whether one rank, which needs no collectives, issues them all the same.
  Collectives collectives = Collectives::kBetweenRanks;

  // Where a shard may end inside a tensor; whole tensors for optimizers that need them.
  Granularity granularity = Granularity::element();

  // Whose values the model begins with. Ranks that are threads of one process share its random
  // number generator, so there rank 0's is the simple choice.
  InitialValues initial_values = InitialValues::kOfEveryRank;

  // Where the buffers are. nullopt: where the parameters are; the CPU for meta parameters.
  std::optional<c10::Device> device = std::nullopt;

  // Where the memory comes from; must outlive the sharded model. nullptr: the host's or libtorch's.
  SlabAllocator* allocator = nullptr;

  // The same for what is offloaded. nullptr: the host's, page-locked where offload.pin says so.
  SlabAllocator* host_allocator = nullptr;

  // UsageError naming the field, its value and the fix.
  void validate() const;
};

}  // namespace fsdp
