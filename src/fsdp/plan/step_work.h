// What the units of a model compute in a step, as kinds of work that a table of rates has.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/base/weight_recipe.h"
#include "fsdp/nn/config/logit_memory.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/plan/rate_table.h"

namespace fsdp {

// So many times this work (RateGrid::work) of these sizes.
struct WorkItem {
  std::string work;
  std::vector<int64_t> sizes;
  double times = 1.0;
};

double us_of(const std::vector<WorkItem>& items, const RateTable& rates);

// What a layer sends to the ranks that share its tokens or experts, while nothing computes.
enum class ExchangeAxis : uint8_t { kTensor, kExpert };
struct Exchange {
  ExchangeAxis axis = ExchangeAxis::kTensor;
  const char* collective;  // "all_gather", ...
  int64_t bytes = 0;       // of the whole side
};

// One direction of a unit.
struct PassWork {
  std::vector<WorkItem> items;
  std::vector<Exchange> exchanges = {};
};

struct UnitWork {
  PassWork forward;
  PassWork backward;  // without what is computed again
};

struct WorkOptions {
  DType compute = DType::kBFloat16;
  WeightRecipe weights = WeightRecipe::kPlain;  // of the blocks' matrices
  int64_t rows = 0;                             // sequences of a tp group
  int64_t sequence = 0;
  int64_t tp = 1;
  int64_t ep = 1;
  double expert_capacity = 0.0;  // as ActivationOptions has it
  int64_t logit_bytes = kDefaultLogitBytes;
  // A CPU adds up the gradients of an input that several matrices have; a GPU's products do.
  bool on_cpu = false;
};

struct ModelWork {
  UnitWork embedding;
  UnitWork block;  // they are all alike
  UnitWork head;
};

// nullopt: not known; it is for the Llama family and the same with experts, without windows,
// multi-token prediction, and quantised experts. Experts are taken to be chosen equally often.
std::optional<ModelWork> work_of(const ModelConfig& config, const WorkOptions& options);

}  // namespace fsdp
