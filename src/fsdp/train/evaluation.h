// The mean loss of a trained model on a corpus.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/comm/world.h"
#include "fsdp/data/corpus.h"
#include "fsdp/train/loaded_model.h"

namespace fsdp::train {

struct EvaluationOptions {
  int64_t sequence = 0;     // 0: as the model was trained; 256 where that is not known
  int64_t batch = 16;       // sequences at a time, of all ranks
  int64_t max_batches = 0;  // 0: all
};

struct Evaluation {
  std::string path;
  int64_t step = 0;
  double loss = 0;  // cross entropy per token, in nats
  int64_t tokens = 0;
};

// All ranks call it, and all get the same.
Evaluation evaluate(const InferenceOptions& inference, const std::shared_ptr<const Corpus>& corpus,
                    const EvaluationOptions& options, World& world);

}  // namespace fsdp::train
