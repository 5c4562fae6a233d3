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

struct UnitWork {
  std::vector<WorkItem> forward;
  std::vector<WorkItem> backward;  // without what is computed again
};

struct WorkOptions {
  DType compute = DType::kBFloat16;
  WeightRecipe weights = WeightRecipe::kPlain;  // of the blocks' matrices
  int64_t rows = 0;                             // sequences
  int64_t sequence = 0;
  int64_t logit_bytes = kDefaultLogitBytes;
  // A CPU adds up the gradients of an input that several matrices have; a GPU's products do.
  bool on_cpu = false;
};

struct ModelWork {
  UnitWork embedding;
  UnitWork block;  // they are all alike
  UnitWork head;
};

// nullopt: not known; it is for the Llama family, without windows and multi-token prediction.
std::optional<ModelWork> work_of(const ModelConfig& config, const WorkOptions& options);

}  // namespace fsdp
