// The options of fully_shard().
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/weight_recipe.h"
#include "fsdp/comm/comm_options.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/pool_options.h"
#include "fsdp/memory/slab_allocator.h"
#include "fsdp/shard/module_roles.h"

namespace fsdp {

// The types of the weights and of the buffers beside them.
struct PrecisionPolicy {
  // The type in which floating-point parameters compute. nullopt: the dtype that each has in the
  // model. Unlike model->to(torch::kBFloat16) before fully_shard(), it leaves main weights
  // unrounded.
  std::optional<at::ScalarType> params = std::nullopt;

  // Main weights, which the optimizer updates. Equal to the parameters' dtype, or nullopt: the
  // weights themselves, never a second copy.
  std::optional<at::ScalarType> main_params = at::kFloat;

  // How main weights are stored. kSplit: fp32 main weights of bf16 parameters are those parameters
  // and 16 bits beside them, 4 bytes together instead of 6, with the same numbers. Other pairs of
  // types are always separate. kSeparate: for optimizers of your own, which change main weights in
  // place (Sharded::flat_shards).
  MainStorage main_storage = MainStorage::kSplit;

  // Main gradients, in which microbatches add up, and which the optimizer reads. nullopt: the
  // parameters' dtype.
  std::optional<at::ScalarType> main_grads = std::nullopt;

  // The type in which gradients travel; sums over ranks are always wide (docs/communication.md).
  // nullopt: the main gradients' dtype. The only field that set_precision() can change later.
  std::optional<at::ScalarType> grad_comm = std::nullopt;

  // These types without torch, for layouts and forecasts.
  PrecisionTypes types() const;

  friend bool operator==(const PrecisionPolicy&, const PrecisionPolicy&) = default;
};

// How a gradient is made of the ranks' own gradients.
enum class GradientOf : uint8_t {
  kMeanOverRanks,  // each rank's loss is a mean over its tokens: sum over ranks / ranks, where the
                   // ranks of a tp group, which have one loss, count as one
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

// The rank whose parameter values a model begins with.
enum class InitialValues : uint8_t {
  kOfEveryRank,  // every rank built the same (from one seed or file); an Error if they differ
  kOfRankZero,   // rank 0's, sent to the others, whose own values are dropped
};

// Optimizer state that lives in the host's memory and is updated there.
struct Offload {
  // Fraction of every shard's elements: 0 none, 1 all; exact to one element.
  double fraction = 0.0;

  // Page-locked memory, which a device reads and writes by itself.
  bool pin = true;

  // Chunks travel while others are updated, and the next forward does not wait for all of them.
  // Off: step() returns when everything is done.
  bool overlap = true;

  // Elements that travel together.
  int64_t chunk_numel = 1 << 20;

  friend bool operator==(const Offload&, const Offload&) = default;
};

// Weights that are gathered as narrow codes and scales, and multiplied so (docs/fp8.md).
struct Quantization {
  // How the trained matrices compute of modules that know how (QuantizableModule): linear layers
  // and experts, not embeddings, heads, norms and routers.
  WeightRecipe recipe = WeightRecipe::kPlain;

  // Parameters that stay plain, by their names in the module tree: "model.layers.0.*" (`*` is any
  // text, dots too, `?` one character).
  std::vector<std::string> except = {};

  // How the gradient of a quantised weight is computed.
  ProductForm weight_gradient = ProductForm::kQuantized;

  // Frozen matrices, too. They keep the numbers that codes are made of, 4 bytes each, until
  // Sharded::drop_frozen_numbers(), and codes alone afterwards.
  bool frozen = false;

  friend bool operator==(const Quantization&, const Quantization&) = default;
};

// Parameters that consist of matrices with one owner each, by name.
struct MatrixParameters {
  // "model.layers.*": those of two or more dimensions that it matches (`*` is any text, dots too,
  // `?` one character).
  std::string pattern;

  // The rows of their matrices, from the top, again and again until the parameter ends: of fused
  // projections, say. Empty: as the module declares them, else one matrix; of three dimensions one
  // for each index of the first.
  std::vector<int64_t> rows = {};

  friend bool operator==(const MatrixParameters&, const MatrixParameters&) = default;
};

// The matrices that an optimizer updates whole (fsdp::Muon): each has one owner, and owners are
// balanced by what its update costs. All other parameters are cut as `granularity` says.
struct WholeMatrices {
  // Those of modules that declare them (MatrixModule): linear layers and experts of fsdp::nn, not
  // embeddings, heads, norms and routers.
  bool declared = false;

  // Others; the first pattern that matches counts.
  std::vector<MatrixParameters> named = {};

  // Parameters that are none in spite of the above, by name.
  std::vector<std::string> except = {};

  friend bool operator==(const WholeMatrices&, const WholeMatrices&) = default;
};

struct ShardOptions {
  // The placements: a row of the table in layout/strategy.h, or any legal ones.
  Strategy strategy = Strategy::optim_grads_params;

  // Modules that are units without being declared as Unit<M>, by their names in the module tree:
  // "layers.*" (`*` is any text between two dots, `?` one character). The program calls them by
  // fsdp::call_unit() (call_unit.h), and keeps the Sharded as long as it calls them.
  std::vector<std::string> units = {};

  // Parameters with one slice per expert along their first dimension, as those of an ExpertModule
  // are, by their names in the module tree: "*.experts.*" (`*` is any text, dots too, `?` one
  // character). Their modules find their ranks by Mesh::ep().
  std::vector<std::string> expert_parameters = {};

  // Placements of parameters in a tp group, as a TensorParallelModule says them; the first
  // pattern that matches counts.
  std::vector<TensorParameters> tensor_parameters = {};

  // Types of main weights, main gradients and gradient communication.
  PrecisionPolicy precision = {};

  // Whether and how weights are quantised.
  Quantization quantization = {};

  // Where gathered weights and unreduced gradients live (docs/memory.md).
  PoolKind pool = PoolKind::kMaxPool;

  // Units gathered ahead of the one that computes; 1 means two units are live.
  int32_t prefetch = 1;

  // Gathers as far ahead as the pool can within this many bytes; 0: as `prefetch` says.
  int64_t pool_budget_bytes = 0;

  // Pools with slots: the reaction to a step in another order, which finds its slot taken.
  OnMove on_move = OnMove::kFollow;

  // Pool `double_buffer`: memory of units that are not like the most common one; with user_buffers
  // always kPersistent.
  OtherUnits other_units = OtherUnits::kOnDemand;

  // Whether NCCL allocates the memory that collectives touch and uses it in place (docs/gpu.md);
  // registered after the first step.
  UserBuffers user_buffers = UserBuffers::kOff;

  // How a gradient is made of the ranks' own gradients.
  GradientOf gradient = GradientOf::kMeanOverRanks;

  // Lanes: a cycle is this many backwards over all data-parallel ranks, a power of two, and their
  // gradients are added in one tree over the lanes' numbers, so that any number of ranks that
  // divides them has the same gradients, bit for bit (docs/engine.md, "Lanes"). Sharded::lane()
  // says which one a backward is of; kMeanOverRanks is the mean over lanes. 0: as many backwards as
  // the program likes, added in the order in which they come.
  int64_t lanes = 0;

  // How long main gradients own memory.
  GradientLifetime gradient_lifetime = GradientLifetime::kPersistent;

  // How much of the optimizer's state (moments and main weights) lives on the host.
  Offload offload = {};

  // Whether NaN and Inf are searched parameter by parameter.
  ReportNan report_nan = ReportNan::kOff;

  // Whether a single rank, which needs no collectives, issues them nevertheless.
  Collectives collectives = Collectives::kBetweenRanks;

  // Where a shard may end inside a tensor; whole tensors for optimizers that need them.
  Granularity granularity = Granularity::element();

  // Parameters whose matrices stay whole, for fsdp::Muon (docs/optimizer.md).
  WholeMatrices matrices = {};

  // Whose values the model begins with. Ranks that are threads of one process share its random
  // number generator; for them rank 0's values are the simple choice.
  InitialValues initial_values = InitialValues::kOfEveryRank;

  // The device of the buffers. nullopt: that of the parameters; the CPU for meta parameters.
  std::optional<c10::Device> device = std::nullopt;

  // For all memory; must outlive the sharded model. nullptr: the host's allocator or libtorch's.
  SlabAllocator* allocator = nullptr;

  // The allocator of offloaded state. nullptr: the host's, page-locked if offload.pin says so.
  SlabAllocator* host_allocator = nullptr;

  // UsageError naming the field, its value and the fix.
  void validate() const;
};

}  // namespace fsdp
