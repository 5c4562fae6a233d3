// Costs of the units of a model for a rank in a step: by parts that were measured on the machine,
// or by a roofline.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/base/weight_recipe.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/model_shape.h"
#include "fsdp/plan/peak_forecast.h"
#include "fsdp/plan/rates.h"

namespace fsdp {

// The bytes that a layer sends to the ranks that share its tokens or experts, while nothing
// computes.
enum class ExchangeAxis : uint8_t { kTensor, kExpert };
struct Exchange {
  ExchangeAxis axis = ExchangeAxis::kTensor;
  const char* collective;  // "all_gather", ...
  int64_t bytes = 0;       // of the whole side
};

struct UnitCost {
  PassTimes compute;  // microseconds; the backward without what is computed again
  double host_us = 0;
  std::vector<Exchange> forward = {};
  std::vector<Exchange> backward = {};
};

enum class CostSource : uint8_t {
  kMeasured,  // this model at this batch
  kScaled,    // this model at another batch, or whole; the quotient of two rooflines times that
  kRoofline,  // nothing of this model: operations and bytes by the machine's rates
};

struct ModelCosts {
  std::vector<UnitCost> units;  // as ModelShape has them
  CostSource source = CostSource::kRoofline;
  BatchShape measured = {};     // the batch of the parts
  double muon_flops_per_s = 0;  // of its matrices' iterations
};

// UsageError for a list of shapes, which does not say what its layers compute, and for products
// that the rates do not have.
ModelCosts costs_of(const ModelShape& model, const PlanOptions& options, const PeakOptions& batch,
                    const Rates& rates);

// All that decides how long a model's parts take but for batch and types: the key of
// MeasuredParts. "": its blocks are of several kinds, and are not measured.
std::string shape_text(const ModelConfig& config);
// "bf16", "fp8-row"
std::string products_name(DType compute, WeightRecipe weights);

// From parts of one model, the rate at which the roofline gives the block's time.
double reached_flops_per_s(const ModelShape& model, const PlanOptions& options,
                           const PeakOptions& batch, const PassTimes& block, double bytes_per_s);

}  // namespace fsdp
