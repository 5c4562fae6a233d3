// A trained model, ready to compute: built from its checkpoint's description, without gradients;
// its mean loss on a corpus; and the text that it writes, token after token, greedily or by chance.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/comm/world.h"
#include "fsdp/data/batches.h"
#include "fsdp/data/corpus.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/shard/sharded.h"
#include "fsdp/train/settings/train_options.h"

namespace fsdp::train {

// --- names of stored tensors ---------------------------------------------------------------------

// Maps the module tree's names to those of published checkpoints, where they differ.
NameRules stored_name_rules(const LanguageModel& model);

// A checkpoint of the model has more than weights: the biases of routers.
std::vector<NamedBuffer> stored_buffers(const LanguageModel& model);

// --- batches -------------------------------------------------------------------------------------

// [rows, sequence] each.
struct ModelBatch {
  at::Tensor tokens;
  at::Tensor targets;  // the token after each token; -100: not learnt
  std::shared_ptr<const Documents> documents = nullptr;  // where a row has more than one
};

ModelBatch to_model_batch(const TokenBatch& batch, c10::Device device);

struct MeanLoss {
  double loss = 0;     // cross entropy per token that is learnt, in nats; 0 without any
  int64_t tokens = 0;  // that are learnt
};

// Over all batches and ranks, without gradients. All ranks call it; `data_parallel_size`: see Mesh.
MeanLoss mean_loss(LanguageModel& model, const ValidationBatches& batches, c10::Device device,
                   Communicator& all, int64_t data_parallel_size);

// --- loading -------------------------------------------------------------------------------------

struct InferenceOptions {
  std::string path;  // of a run, a checkpoint, or safetensors files of other tools
  // A preset, a config.json or a directory with one; "": the checkpoint's own config.json. Of
  // adapters, a directory with the frozen weights; "": where they were.
  std::string model = {};
  std::string device = "auto";   // as --device
  std::string compute = "auto";  // as --compute
};

struct LoadedModel {
  std::shared_ptr<LanguageModel> model;
  Sharded sharded;
  c10::Device device;
  std::string path;      // of the checkpoint
  int64_t step = 0;      // 0 for files of other tools
  int64_t sequence = 0;  // the sequence length of its training, in tokens; 0: not known
};

// All ranks of the mesh call it; the mesh must outlive the result.
LoadedModel load_for_inference(const InferenceOptions& options, const Mesh& mesh);

// The tensors of adapters, for StoredForm::only and the like; with none, no tensors.
std::vector<std::string> adapter_globs(const LoraOptions& lora);

// --- evaluation ----------------------------------------------------------------------------------

struct EvaluationOptions {
  int64_t sequence = 0;     // 0: as the model was trained; 256 where that is not known
  int64_t batch = 16;       // sequences at a time, of all ranks
  int64_t max_batches = 0;  // 0: all
  std::optional<WindowDocuments> documents = std::nullopt;
};

struct Evaluation {
  std::string path;
  int64_t step = 0;
  MeanLoss mean;
};

// All ranks call it and get the same result.
Evaluation evaluate(const InferenceOptions& inference, const std::shared_ptr<const Corpus>& corpus,
                    const EvaluationOptions& options, World& world);

// --- writing text --------------------------------------------------------------------------------

struct SamplingOptions {
  int64_t max_tokens = 200;
  // Divides the logits: below 1, likely tokens become likelier. 0: always the likeliest one.
  double temperature = 0.0;
  double top_p = 1.0;  // the likeliest tokens with this probability together are drawn from
  uint64_t seed = 0;
  std::vector<int64_t> end_tokens = {};  // that end the text, and are not part of it
  int64_t max_context = 1024;            // tokens that the model sees; older ones are forgotten
};

// The index of the next token among these logits. `draw` is a random number in [0, 1).
int64_t choose_token(std::span<const float> logits, const SamplingOptions& options, double draw);

// The tokens after the prompt, which must not be empty; `on_token` gets each one at once. All ranks
// of a sharded model call it and get the same tokens, from the same logits and draws.
std::vector<int64_t> generate(LanguageModel& model, std::span<const int64_t> prompt,
                              const SamplingOptions& options, c10::Device device,
                              const std::function<void(int64_t)>& on_token = {});

}  // namespace fsdp::train
