#include "fsdp/train/model/trained_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/log.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/data/batches.h"
#include "fsdp/data/token_windows.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/model/adapters.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/run_data.h"
#include "fsdp/train/run_options.h"
#include "fsdp/train/run_plan.h"
#include "fsdp/train/settings/settings.h"

namespace fsdp::train {

namespace {

ModelConfig config_of(const InferenceOptions& options, const std::string& path) {
  if (!options.model.empty()) {
    const ModelConfig model = find_model(options.model).config;
    check_same_model(path, model, ModelAspect::kTensors, "leave --model out");
    return model;
  }
  const std::optional<std::string> text = TensorCatalog(path).model_config();
  if (!text)
    throw UsageError(concat(path,
                            " has no config.json, so the model is not known; name it with "
                            "--model"));
  return parse_model_config(*text, concat(path, "/config.json"));
}

// The sequence length that the run noted; a user's own program may note other things.
int64_t sequence_of(const LoadedCheckpoint& loaded) {
  if (loaded.data_of_ranks.empty()) return 0;
  try {
    return parse_data_position(loaded.data_of_ranks.front(), loaded.path).sequence;
  } catch (const UsageError&) {
    return 0;
  }
}

constexpr int64_t kSequence = 256;  // for models whose training is not known

int64_t sequence_for(const EvaluationOptions& options, const LoadedModel& loaded) {
  const int64_t positions = max_positions_of(loaded.model->config());
  if (options.sequence > positions)
    throw UsageError(concat("--sequence is ", options.sequence, ", more than the ", positions,
                            " positions (max_position_embeddings) of the model; lower it"));
  if (options.sequence > 0) return options.sequence;
  return loaded.sequence > 0 ? loaded.sequence : std::min(kSequence, positions);
}

}  // namespace

NameRules stored_name_rules(const LanguageModel& model) {
  std::vector<NameRule> rules;
  for (const StoredName& name : model.stored_names()) {
    NameRule rule{.title = "published name", .pattern = name.in_tree, .sections = {}};
    for (const std::string& stored : name.stored) rule.sections.push_back({.name = stored});
    rules.push_back(std::move(rule));
  }
  return NameRules(std::move(rules));
}

std::vector<NamedBuffer> stored_buffers(const LanguageModel& model) {
  std::vector<NamedBuffer> buffers;
  for (const auto& item : model.named_buffers()) buffers.push_back({item.key(), item.value()});
  return buffers;
}

ModelBatch to_model_batch(const TokenBatch& batch, c10::Device device) {
  const int64_t sequence = batch.columns - 1;
  const auto on_device = [&](const std::vector<int64_t>& values, int64_t columns) {
    return at::tensor(values, at::kLong).view({batch.rows, columns}).to(device);
  };
  ModelBatch result{on_device(batch.tokens, batch.columns).slice(1, 0, sequence),
                    on_device(batch.targets, sequence)};
  // Rows of one document each are computed as all rows are.
  if (static_cast<int64_t>(batch.document_starts.size()) > batch.rows)
    result.documents =
        std::make_shared<const Documents>(batch.document_starts, batch.rows, sequence, device);
  return result;
}

MeanLoss mean_loss(LanguageModel& model, const ValidationBatches& batches, c10::Device device,
                   Communicator& all, int64_t data_parallel_size) {
  FSDP_ASSERT(batches.num_batches() > 0);
  const at::NoGradGuard no_grad;
  at::Tensor sums = at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device));
  for (int64_t i = 0; i < batches.num_batches(); ++i) {
    const TokenBatch read = batches.read(i);
    const ModelBatch batch = to_model_batch(read, device);
    const auto num_targets = static_cast<double>(read.num_targets);
    // The first term is the cross entropy alone; the others only help training.
    const ModelLoss loss = model.loss(batch.tokens, batch.targets, batch.documents);
    sums[0] += loss.terms.front().value.to(at::kDouble) * num_targets;
    sums[1] += num_targets;
  }
  // The mean over ranks is the same whether or not tp groups share their losses.
  all.all_reduce(sums, {.op = ReduceOp::kAvg}, "mean loss").wait();
  sums = sums.to(at::kCPU);
  const double sum = sums[0].item<double>();
  const double count = sums[1].item<double>();
  return {.loss = count > 0 ? sum / count : 0.0,
          .tokens = std::llround(count * static_cast<double>(data_parallel_size))};
}

std::vector<std::string> adapter_globs(const LoraOptions& lora) {
  return lora.is_on() ? std::vector{std::string(kAdapterTensors)} : std::vector<std::string>();
}

LoadedModel load_for_inference(const InferenceOptions& options, const Mesh& mesh) {
  TrainOptions given;
  apply_given(given, {{"device", {options.device}}, {"compute", {options.compute}}});
  if (given.compute && element_bytes(*given.compute) < 2)
    throw UsageError(concat("--compute is ", name_of(*given.compute),
                            "; models compute in fp64, fp32, bf16 or fp16"));
  const c10::Device device = training_device(given, mesh.inner().rank());
  const DType compute = compute_dtype(given, device);
  const std::string slow = slow_compute_text(compute, device, this_cpu());
  if (mesh.inner().rank() == 0 && !slow.empty()) log(LogLevel::kWarning, slow);
  const std::string path = checkpoint_or_files(options.path);
  const std::optional<AdapterDescription> adapters = stored_adapters(path);
  if (adapters && is_of_peft(path))
    throw UsageError(concat(path,
                            " holds adapters alone, as PEFT writes them; merge them first, and "
                            "name what comes out: fsdp convert ",
                            path, " DIR --to hf --merge --base ",
                            is_directory(options.model) ? options.model : "MODEL"));
  std::shared_ptr<LanguageModel> model;
  {
    const MetaConstruction meta;
    model = build_language_model(
        config_of(options, path),
        {.dtype = scalar_type_of(compute), .lora = adapters ? adapters->lora : LoraOptions()});
  }
  // Frozen: neither gradients nor main weights need memory.
  for (at::Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
  const Sharded sharded =
      fully_shard(std::static_pointer_cast<torch::nn::Module>(model), mesh, {.device = device});
  LoadOptions loading;
  loading.names = stored_name_rules(*model);
  loading.ignored = model->ignored_names();
  loading.is_tolerance_offered = false;
  CheckpointState state{.sharded = sharded, .buffers = stored_buffers(*model)};
  if (adapters) {
    loading.allow_missing = adapter_globs(adapters->lora);
    load_checkpoint(find_base(*adapters, options.model, "--model"), state, loading);
    loading.only = std::exchange(loading.allow_missing, {});
    state.buffers.clear();
  }
  const LoadedCheckpoint loaded = load_checkpoint(path, state, loading);
  return {model, sharded, device, path, loaded.step, sequence_of(loaded)};
}

Evaluation evaluate(const InferenceOptions& inference, const std::shared_ptr<const Corpus>& corpus,
                    const EvaluationOptions& options, World& world) {
  const Mesh mesh = world.mesh();
  const LoadedModel loaded = load_for_inference(inference, mesh);
  const int64_t sequence = sequence_for(options, loaded);
  corpus->check_model_vocabulary(vocab_size_of(loaded.model->config()));
  const WindowDocuments documents = window_documents(options.documents, *corpus);
  const TokenWindows windows = all_windows(corpus, sequence, content_of(documents));
  // Uses no window twice: short data makes a smaller batch, if every rank can have one.
  const int64_t ranks = world.size();
  int64_t batch = options.batch;
  if (windows.num_windows() < batch && windows.num_windows() >= ranks)
    batch = windows.num_windows() / ranks * ranks;
  const ValidationBatches batches(windows, {.batch = batch,
                                            .ranks = ranks,
                                            .rank = world.rank(),
                                            .max_batches = options.max_batches,
                                            .documents = documents});
  return {.path = loaded.path,
          .step = loaded.step,
          .mean = mean_loss(*loaded.model, batches, loaded.device, world.communicator(), ranks)};
}

// --- writing text --------------------------------------------------------------------------------

int64_t choose_token(std::span<const float> logits, const SamplingOptions& options, double draw) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  if (options.temperature == 0.0) return likeliest - logits.begin();

  std::vector<double> weights(logits.size());
  for (size_t i = 0; i < logits.size(); ++i)
    weights[i] = std::exp((double{logits[i]} - *likeliest) / options.temperature);
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Stable, so that every machine draws equal logits in the order of their tokens.
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return weights[a] > weights[b]; });

  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double kept = 0;
  size_t num_kept = 0;
  while (num_kept < order.size() && (num_kept == 0 || kept < options.top_p * total))
    kept += weights[order[num_kept++]];
  double left = draw * kept;
  for (size_t i = 0; i < num_kept; ++i) {
    left -= weights[order[i]];
    if (left < 0) return static_cast<int64_t>(order[i]);
  }
  return static_cast<int64_t>(order[num_kept - 1]);
}

namespace {

// The logits after a text that grows. As long as the model sees the whole text, only new tokens are
// computed; later each new token shifts the positions of all others.
class NextLogits {
 public:
  NextLogits(LanguageModel& model, int64_t max_context, c10::Device device)
      : model_(model), max_context_(static_cast<size_t>(max_context)), device_(device) {}

  // [1, vocabulary]
  at::Tensor after(const std::vector<int64_t>& text) {
    if (text.size() > max_context_)
      return model_.logits(tokens_of(std::span(text).last(max_context_))).select(1, -1);
    const at::Tensor unseen = tokens_of(std::span(text).subspan(num_seen_));
    num_seen_ = text.size();
    return model_.next_logits(unseen, cache_);
  }

 private:
  at::Tensor tokens_of(std::span<const int64_t> tokens) const {
    return at::tensor(at::ArrayRef<int64_t>(tokens.data(), tokens.size()), at::kLong)
        .unsqueeze(0)
        .to(device_);
  }

  LanguageModel& model_;
  const size_t max_context_;
  const c10::Device device_;
  DecodingCache cache_;
  size_t num_seen_ = 0;
};

}  // namespace

std::vector<int64_t> generate(LanguageModel& model, std::span<const int64_t> prompt,
                              const SamplingOptions& options, c10::Device device,
                              const std::function<void(int64_t)>& on_token) {
  if (prompt.empty()) throw UsageError("--prompt is empty; give some text to begin with");
  const at::NoGradGuard no_grad;
  std::vector<int64_t> text(prompt.begin(), prompt.end());
  std::vector<int64_t> written;
  NextLogits next(model, options.max_context, device);
  while (static_cast<int64_t>(written.size()) < options.max_tokens) {
    const at::Tensor last = next.after(text).to(at::kCPU, at::kFloat).contiguous();
    const uint64_t bits = mixed_bits(mixed_bits(options.seed) + written.size());
    const double draw = static_cast<double>(bits >> 11) * 0x1p-53;
    const int64_t token = choose_token(
        {last.const_data_ptr<float>(), static_cast<size_t>(last.numel())}, options, draw);
    const auto& ends = options.end_tokens;
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) break;
    written.push_back(token);
    text.push_back(token);
    if (on_token) on_token(token);
  }
  return written;
}

}  // namespace fsdp::train
