// The most memory that a step takes on a GPU: what sharding keeps, what a forward leaves for its
// backward, what is being computed meanwhile, and what libtorch's allocator adds.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "fsdp/base/weight_recipe.h"
#include "fsdp/memory/bucket.h"
#include "fsdp/nn/config/logit_memory.h"
#include "fsdp/plan/activations.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/group_plan.h"

namespace fsdp {

// The blocks that libtorch's CUDA allocator gives out. Follows that allocator (with its default
// settings) through requests that are all kept. Pieces of
// more than 1 MiB come from segments of 20 MiB or, from 10 MiB on, from ones of their own in
// multiples of 2 MiB; a rest of up to 1 MiB is not worth splitting off and goes with the piece.
class AllocatorBlocks {
 public:
  // The bytes of the block, at least `bytes`.
  int64_t give(int64_t bytes);

 private:
  std::multiset<int64_t> rests_;  // of segments, free
};

// The batch that one rank computes at a time.
struct BatchShape {
  int64_t rows = 0;      // sequences
  int64_t sequence = 0;  // tokens of each

  int64_t tokens() const;
};

struct PeakOptions {
  BatchShape batch;
  GradientLifetime gradient_lifetime = GradientLifetime::kPersistent;
  int64_t logit_bytes = kDefaultLogitBytes;  // of the tokens that have logits at once
  bool recomputes_blocks = false;            // keeps the input of each, and all of one at a time
  double expert_capacity = 0.0;              // with several ranks of experts
  bool pads_experts = true;                  // ActivationOptions
  ProductForm weight_gradient = ProductForm::kQuantized;  // of quantised weights
};

// Bytes at the moment when there are most, by what they are for.
struct PeakForecast {
  std::string_view when;    // "the backward of the loss"
  int64_t state = 0;        // weights, main weights, moments and pools
  int64_t gradients = 0;    // main gradients that have memory then
  int64_t activations = 0;  // kept for the backward, and the batch
  int64_t working = 0;      // what is being computed
  int64_t workspaces = 0;   // of matrix products
  int64_t rounding = 0;     // what the allocator adds to the state's pieces
  // Beside what libtorch's allocator gives out: the CUDA context with its kernels.
  int64_t context = 0;

  // The bytes that libtorch's allocator has given out.
  int64_t allocated() const {
    return state + gradients + activations + working + workspaces + rounding;
  }
  int64_t total() const { return allocated() + context; }
};

// Whether it is known what the layers of a model keep of sequences of so many tokens in this type.
bool knows_activations(const ModelShape& model, DType compute, int64_t sequence);

// UsageError for a model whose activations are not known.
PeakForecast forecast_peak(const ModelShape& model, std::span<const GroupPlan> groups,
                           const Forecast& forecast, const PeakOptions& options);

}  // namespace fsdp
