#include "fsdp/plan/peak_forecast.h"

#include <algorithm>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/quantized_bytes.h"
#include "fsdp/layout/state_bytes.h"

namespace fsdp {

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// libtorch's allocator gives out multiples of this.
constexpr int64_t kBlockBytes = 512;
constexpr int64_t kSmall = kMiB;  // up to here pieces share segments that are split anywhere
constexpr int64_t kSharedSegment = 20 * kMiB;
constexpr int64_t kOwnSegment = 10 * kMiB;  // from here on
constexpr int64_t kSegmentUnit = 2 * kMiB;

// What libtorch gives cuBLAS on Hopper, once for the thread that runs the forward and once for that
// of the backward.
constexpr int64_t kWorkspaceBytes = 2 * (int64_t{32} << 20);
// Measured on an H200 with CUDA 13.0 (bench/results): the context, and kernels as they are loaded.
constexpr int64_t kContextBytes = 810'000'000;
constexpr int64_t kLogSumBytes = 4;
constexpr int64_t kSumBytes = 4;    // of narrow products that are added up
constexpr int64_t kSumsOfLoss = 3;  // per token
constexpr int64_t kTokenBytes = 8;

struct Widths {
  int64_t hidden, queries, keys, intermediate, heads, kv_heads, vocabulary;
};

Widths widths_of(const LlamaConfig& c) {
  const int64_t head_dim = head_dim_of(c);
  return {.hidden = c.hidden_size,
          .queries = c.num_attention_heads * head_dim,
          .keys = c.num_key_value_heads * head_dim,
          .intermediate = c.intermediate_size,
          .heads = c.num_attention_heads,
          .kv_heads = c.num_key_value_heads,
          .vocabulary = c.vocab_size};
}

int64_t kept_bytes(int64_t tokens, int64_t elements_per_token, int64_t element) {
  return round_up(checked_mul(checked_mul(tokens, elements_per_token), element), kBlockBytes);
}

int64_t kept_bytes(int64_t tokens, std::span<const KeptTensor> kept) {
  int64_t sum = 0;
  for (const KeptTensor& tensor : kept)
    sum = checked_add(sum, kept_bytes(tokens, tensor.elements_per_token, tensor.element_bytes));
  return sum;
}

// What a rank's main gradients of each unit take.
std::vector<int64_t> gradients_by_unit(std::span<const GroupPlan> groups, size_t num_units,
                                       PlacementPair placed) {
  std::vector<int64_t> bytes(num_units, 0);
  for (const GroupPlan& group : groups)
    if (group.types.trainable)
      bytes[static_cast<size_t>(group.unit)] +=
          checked_mul(group.layout.max_shard_numel(placed), element_bytes(group.types.main_grad));
  return bytes;
}

// What rounding adds to the pieces that stay, in the order in which they are taken.
int64_t rounding_of_state(std::span<const GroupPlan> groups, const PlanOptions& options,
                          GradientLifetime lifetime) {
  AllocatorBlocks blocks;
  int64_t added = 0;
  const auto take = [&](int64_t numel, int64_t element) {
    const int64_t bytes = checked_mul(numel, element);
    added += blocks.give(bytes) - bytes;
  };
  const auto on_device = [&](const GroupPlan& group) {
    return numel_of(
        state_places(group.layout.shard_ranges(options.strategy.optimizer, {}), options.offload)
            .device);
  };
  for (const GroupPlan& group : groups) {
    take(weight_bytes(group.types, group.layout.max_shard_numel(options.strategy.parameter)), 1);
    if (!group.types.trainable) continue;
    take(on_device(group), main_weight_bytes(group.types));
    if (lifetime == GradientLifetime::kPersistent)
      take(group.layout.max_shard_numel(options.strategy.gradient),
           element_bytes(group.types.main_grad));
  }
  for (const GroupPlan& group : groups)
    for (const std::optional<DType>& moment : {group.types.first_moment, group.types.second_moment})
      if (group.types.trainable && moment) take(on_device(group), element_bytes(*moment));
  return added;
}

// What a block's backward has at most beside what the block keeps: of the MLP the gradients of its
// two inputs, of attention those of queries, keys and values with the fp32 sums of the former, when
// the MLP's tensors are gone.
int64_t working_of_block(const LlamaConfig& config, int64_t tokens, int64_t element) {
  const Widths w = widths_of(config);
  const int64_t mlp = kept_bytes(tokens, w.hidden + 2 * w.intermediate, element);
  const int64_t attention = kept_bytes(tokens, w.hidden + 2 * w.queries, element) +
                            2 * kept_bytes(tokens, w.queries, element) +
                            kept_bytes(tokens, w.queries + w.heads, 4) -
                            kept_bytes(tokens, w.hidden + 3 * w.intermediate, element);
  return std::max(mlp, attention);
}

// The logits of a chunk, which their gradient replaces, and numbers of all tokens.
int64_t working_of_loss(const LlamaConfig& config, int64_t tokens, int64_t element,
                        int64_t logit_bytes) {
  const int64_t rows = rows_of_logit_chunk(
      {.rows = tokens, .vocabulary = config.vocab_size, .element_bytes = element}, logit_bytes);
  return kept_bytes(rows, config.vocab_size, element) +
         kept_bytes(tokens, kSumsOfLoss, kLogSumBytes);
}

}  // namespace

int64_t AllocatorBlocks::give(int64_t bytes) {
  const int64_t size = round_up(bytes, kBlockBytes);
  if (size <= kSmall) return size;
  auto found = rests_.lower_bound(size);  // the smallest that fits
  if (found == rests_.end())
    found = rests_.insert(size < kOwnSegment ? kSharedSegment : round_up(size, kSegmentUnit));
  const int64_t block = *found;
  rests_.erase(found);
  const int64_t rest = block - size;
  if (rest <= kSmall) return block;
  rests_.insert(rest);
  return size;
}

int64_t BatchShape::tokens() const { return checked_mul(rows, sequence); }

std::vector<KeptTensor> kept_by_block(const LlamaConfig& config, DType compute) {
  const Widths w = widths_of(config);
  const int64_t element = element_bytes(compute);
  std::vector<KeptTensor> kept = {{"the block's input", w.hidden, element},
                                  {"its norm's factors", 1, kLogSumBytes},
                                  {"normed", w.hidden, element},
                                  {"queries, rotated", w.queries, element},
                                  {"keys, rotated", w.keys, element},
                                  {"values", w.keys, element},
                                  {"what attention returns", w.queries, element},
                                  {"logarithms of its sums", w.heads, kLogSumBytes},
                                  {"the sum before the MLP", w.hidden, element},
                                  {"its norm's factors", 1, kLogSumBytes},
                                  {"normed", w.hidden, element},
                                  {"gate", w.intermediate, element},
                                  {"up", w.intermediate, element},
                                  {"their product", w.intermediate, element}};
  if (config.qk_norm)
    kept.insert(kept.end(), {{"queries before their norm", w.queries, element},
                             {"keys before theirs", w.keys, element},
                             {"factors of both", w.heads + w.kv_heads, kLogSumBytes}});
  return kept;
}

std::vector<KeptTensor> kept_by_head(const LlamaConfig& config, DType compute) {
  const Widths w = widths_of(config);
  const int64_t element = element_bytes(compute);
  return {{"the last block's output", w.hidden, element},
          {"its norm's factors", 1, kLogSumBytes},
          {"the gradient of what was normed", w.hidden, element}};
}

bool knows_activations(const ModelShape& model, DType compute) {
  return model.layers && (compute == DType::kBFloat16 || compute == DType::kFloat16);
}

PeakForecast forecast_peak(const ModelShape& model, std::span<const GroupPlan> groups,
                           const Forecast& forecast, const PeakOptions& options) {
  const DType compute = forecast.options.compute;
  if (!knows_activations(model, compute))
    throw UsageError(concat("the activations of model '", model.name,
                            "' are not known; they are for models of the Llama family in bf16, "
                            "without experts and multi-token prediction"));
  const LlamaConfig& config = *model.layers;
  if (config.sliding_window > 0 && config.sliding_window < options.batch.sequence)
    throw UsageError(concat("sliding_window is ", config.sliding_window, ", less than the ",
                            options.batch.sequence,
                            " tokens of a sequence; activations are known for windows that long"));
  const Widths w = widths_of(config);
  const int64_t element = element_bytes(compute);
  const int64_t tokens = options.batch.tokens();
  const int64_t num_blocks = config.num_hidden_layers;
  const int64_t block = kept_bytes(tokens, kept_by_block(config, compute));
  const int64_t head = kept_bytes(tokens, kept_by_head(config, compute)) +
                       kept_bytes(w.vocabulary, w.hidden, kSumBytes);
  const int64_t hidden = kept_bytes(tokens, w.hidden, element);
  const int64_t batch = 2 * kept_bytes(tokens, 1, kTokenBytes);
  const std::vector<int64_t> by_unit =
      gradients_by_unit(groups, model.units.size(), forecast.options.strategy.gradient);
  const bool persist = options.gradient_lifetime == GradientLifetime::kPersistent;
  // Main gradients when the backward of unit `first` has begun; the last unit is the head.
  const auto gradients_from = [&](int64_t first) {
    return std::accumulate(by_unit.begin() + (persist ? 0 : first), by_unit.end(), int64_t{0});
  };
  const int64_t rounding = rounding_of_state(groups, forecast.options, options.gradient_lifetime);
  const int64_t end = static_cast<int64_t>(by_unit.size());

  std::vector<PeakForecast> moments;
  const auto add = [&](std::string_view when, int64_t first_unit, int64_t kept, int64_t working) {
    moments.push_back({.when = when,
                       .state = forecast.bytes.total() - forecast.bytes.main_grad,
                       .gradients = gradients_from(first_unit),
                       .activations = batch + kept,
                       .working = working,
                       .workspaces = kWorkspaceBytes,
                       .rounding = rounding,
                       .context = kContextBytes});
  };
  // What `count` blocks keep while none of them is computed again.
  const auto kept_by = [&](int64_t count) {
    return checked_mul(count, options.recomputes_blocks ? hidden : block);
  };
  const int64_t blocks = kept_by(num_blocks);
  add("the loss", end, blocks + head,
      hidden + working_of_loss(config, tokens, element, options.logit_bytes));
  add("the backward of the head", end - 1, blocks + head, hidden);
  const int64_t working = working_of_block(config, tokens, element);
  // A block that is computed again has its output once more.
  const int64_t again = options.recomputes_blocks ? hidden : 0;
  for (int64_t i = num_blocks; i >= 1; --i)
    add("the backward of a block", i, kept_by(i - 1) + block, hidden + again + working);
  // Autograd has the embedding's gradient whole, in the type of the weights, before it is added up.
  add("the backward of the embedding", 0, 0,
      2 * hidden + kept_bytes(w.vocabulary, w.hidden, element));
  return *std::max_element(
      moments.begin(), moments.end(),
      [](const PeakForecast& a, const PeakForecast& b) { return a.allocated() < b.allocated(); });
}

}  // namespace fsdp
