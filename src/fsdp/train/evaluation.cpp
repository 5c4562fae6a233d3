#include "fsdp/train/evaluation.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "fsdp/base/error.h"
#include "fsdp/data/batches.h"
#include "fsdp/train/model_batch.h"

namespace fsdp::train {

namespace {

constexpr int64_t kSequence = 256;  // of models that nothing is known of

int64_t sequence_for(const EvaluationOptions& options, const LoadedModel& loaded) {
  const int64_t positions = max_positions_of(loaded.model->config());
  if (options.sequence > positions)
    throw UsageError(concat("--sequence is ", options.sequence, ", more than the ", positions,
                            " positions (max_position_embeddings) of the model; lower it"));
  if (options.sequence > 0) return options.sequence;
  return loaded.sequence > 0 ? loaded.sequence : std::min(kSequence, positions);
}

}  // namespace

Evaluation evaluate(const InferenceOptions& inference, const std::shared_ptr<const Corpus>& corpus,
                    const EvaluationOptions& options, World& world) {
  const Mesh mesh = world.mesh();
  const LoadedModel loaded = load_for_inference(inference, mesh);
  const int64_t sequence = sequence_for(options, loaded);
  corpus->check_model_vocabulary(vocab_size_of(loaded.model->config()));
  const TokenWindows windows = all_windows(corpus, sequence);
  // No window twice: short data makes a smaller batch, if every rank can have one.
  const int64_t ranks = world.size();
  int64_t batch = options.batch;
  if (windows.num_windows() < batch && windows.num_windows() >= ranks)
    batch = windows.num_windows() / ranks * ranks;
  const ValidationBatches batches(
      windows,
      {.batch = batch, .ranks = ranks, .rank = world.rank(), .max_batches = options.max_batches});
  return {.path = loaded.path,
          .step = loaded.step,
          .loss = mean_loss(*loaded.model, batches, loaded.device, world.communicator()),
          .tokens = batches.num_batches() * batch * sequence};
}

}  // namespace fsdp::train
