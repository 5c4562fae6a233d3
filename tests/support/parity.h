// Trains twice: sharded over ranks, and plain in one process on all ranks' data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

#include "fsdp/comm/world.h"
#include "fsdp/shard/options.h"
#include "support/parity_models.h"

namespace fsdp::testing {

enum class Precision : uint8_t {
  kFp32,       // everything
  kBf16,       // bf16 weights and activations; fp32 main weights, main gradients and wire
  kBf16Wire,   // the same with a bf16 wire
  kBf16Grads,  // with bf16 main gradients and wire
  kBf16Alone,  // no main weights, and gradients of the weights' type
};

const char* name_of(Precision precision);

// Who updates the sharded model; the plain one is always updated by libtorch's AdamW.
enum class UpdatedBy : uint8_t {
  kLibtorch,       // its AdamW, on views of the main weights
  kOurs,           // fsdp::AdamW, hidden; bf16 weights have split main weights
  kOursOffloaded,  // the same, 0.4 of it on the host
};

const char* name_of(UpdatedBy updated_by);

struct ParityCase {
  ModelKind model = ModelKind::kMlp;
  std::string strategy = "optim_grads_params";
  int outer = 1;
  int inner = 1;
  PoolKind pool = PoolKind::kMaxPool;
  int microbatches = 1;
  Precision precision = Precision::kFp32;
  GradientLifetime lifetime = GradientLifetime::kPersistent;
  GradientOf gradient = GradientOf::kMeanOverRanks;
  UpdatedBy updated_by = UpdatedBy::kLibtorch;

  int ranks() const { return outer * inner; }
  at::ScalarType compute() const;
  ShardOptions options() const;
  // Letters, digits and underscores: "llama_optim_grads_2x2_planned_mb3_bf16wire_step_sum_ours".
  std::string name() const;
};

// For messages of GoogleTest.
void PrintTo(const ParityCase& parity, std::ostream* out);

inline constexpr int kParitySteps = 5;

// --- sharded -------------------------------------------------------------------------------------

// Elements [begin, begin + value.numel()) of a flattened parameter.
struct Piece {
  std::string name;
  int64_t begin = 0;
  at::Tensor value;
};

// One rank's losses, gradients and final weights.
struct RankOutcome {
  std::vector<float> losses;                  // of every step and microbatch
  std::vector<Piece> first_gradients;         // of step 1, in the optimizer's placement
  std::vector<Piece> main_weights;            // after the last step, in the optimizer's placement
  std::map<std::string, at::Tensor> weights;  // whole, in the compute dtype
};

// kParitySteps steps on this rank's part. All ranks call it.
RankOutcome train_rank(World& world, const ParityCase& parity);

// Trains on thread ranks.
std::vector<RankOutcome> train_threads(const ParityCase& parity);

// Losses, main weights and weights are the same bits; gradients of step 1, too.
void expect_equal_bits(const RankOutcome& actual, const RankOutcome& expected);

// --- plain ---------------------------------------------------------------------------------------

struct PlainParameter {
  at::Tensor first_gradient;
  // The mean or sum over ranks and microbatches of |gradient|, of step 1: roundings of sums are
  // relative to it.
  at::Tensor first_magnitude;
  at::Tensor main_weight;
  at::Tensor weight;
  // How far main_weight moves, to first order, when every gradient is off by its magnitude.
  at::Tensor sensitivity;
};

struct PlainOutcome {
  std::vector<std::vector<float>> losses;  // by rank, then as RankOutcome's
  std::map<std::string, PlainParameter> parameters;
};

// Reads model, number of ranks, microbatches, precision and gradient. Kept for the next call.
const PlainOutcome& train_plain(const ParityCase& parity);

// One rank and libtorch's AdamW: the same bits. Else: within the tolerances that parity.cpp
// derives.
void expect_parity(const RankOutcome& actual, const ParityCase& parity, int rank);

}  // namespace fsdp::testing
