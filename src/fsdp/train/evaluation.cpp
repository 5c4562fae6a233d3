#include "fsdp/train/evaluation.h"

#include <ATen/ATen.h>

#include "fsdp/base/error.h"
#include "fsdp/data/batches.h"
#include "fsdp/train/model_batch.h"

namespace fsdp::train {

Evaluation evaluate(const InferenceOptions& inference, const std::shared_ptr<const Corpus>& corpus,
                    const EvaluationOptions& options, World& world) {
  const Mesh mesh = world.mesh();
  const LoadedModel loaded = load_for_inference(inference, mesh);
  const int64_t positions = max_positions_of(loaded.model->config());
  if (options.sequence > positions)
    throw UsageError(concat("--sequence is ", options.sequence, ", more than the ", positions,
                            " positions (max_position_embeddings) of the model; lower it"));
  corpus->check_model_vocabulary(vocab_size_of(loaded.model->config()));
  const ValidationBatches batches(all_windows(corpus, options.sequence),
                                  {.batch = options.batch,
                                   .ranks = world.size(),
                                   .rank = world.rank(),
                                   .max_batches = options.max_batches});
  return {.path = loaded.path,
          .step = loaded.step,
          .loss = mean_loss(*loaded.model, batches, loaded.device, world.communicator()),
          .tokens = batches.num_batches() * options.batch * options.sequence};
}

}  // namespace fsdp::train
