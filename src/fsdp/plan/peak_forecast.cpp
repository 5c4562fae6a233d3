#include "fsdp/plan/peak_forecast.h"

#include <algorithm>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
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

// The workspace that libtorch gives cuBLAS on Hopper, once for the thread that runs the forward and
// once for that of the backward.
constexpr int64_t kWorkspaceBytes = 2 * (int64_t{32} << 20);
// Measured on an H200 with CUDA 13.0 (bench/results): the context, and kernels as they are loaded.
constexpr int64_t kContextBytes = 810'000'000;
constexpr int64_t kLogSumBytes = 4;
constexpr int64_t kSumBytes = 4;    // of narrow products that are added up
constexpr int64_t kSumsOfLoss = 3;  // per token
constexpr int64_t kTokenBytes = 8;

// The bytes of a rank's main gradients, by unit.
std::vector<int64_t> gradients_by_unit(std::span<const GroupPlan> groups, size_t num_units,
                                       PlacementPair placed) {
  std::vector<int64_t> bytes(num_units, 0);
  for (const GroupPlan& group : groups)
    if (group.types.trainable)
      bytes[static_cast<size_t>(group.unit)] +=
          checked_mul(group.layout.max_shard_numel(placed), element_bytes(group.types.main_grad));
  return bytes;
}

// The bytes that rounding adds to the pieces that stay, in the order in which they are taken.
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

// The logits of a chunk, which their gradient replaces, and numbers of all tokens.
int64_t working_of_loss(int64_t vocabulary, int64_t tokens, int64_t element, int64_t logit_bytes) {
  const int64_t rows = rows_of_logit_chunk(
      {.rows = tokens, .vocabulary = vocabulary, .element_bytes = element}, logit_bytes);
  return kept_bytes(rows, vocabulary, element) + kept_bytes(tokens, kSumsOfLoss, kLogSumBytes);
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

namespace {

std::optional<ModelActivations> activations_of(const ModelShape& model,
                                               const ActivationOptions& options) {
  return model.layers ? activations_of(*model.layers, options) : std::nullopt;
}

// Whether layers of a unit keep codes of their inputs: those of recipes whose products read them.
bool keeps_codes(std::span<const GroupPlan> groups, int64_t unit, ProductForm weight_gradient) {
  return weight_gradient == ProductForm::kQuantized &&
         std::any_of(groups.begin(), groups.end(), [&](const GroupPlan& group) {
           return group.unit == unit && (group.types.recipe == WeightRecipe::kFp8Row ||
                                         group.types.recipe == WeightRecipe::kFp8Tensor);
         });
}

}  // namespace

bool knows_activations(const ModelShape& model, DType compute) {
  return activations_of(model, {.compute = compute}).has_value();
}

PeakForecast forecast_peak(const ModelShape& model, std::span<const GroupPlan> groups,
                           const Forecast& forecast, const PeakOptions& options) {
  const DType compute = forecast.options.compute;
  ActivationOptions activations{.compute = compute,
                                .ep = forecast.options.ep,
                                .expert_capacity = options.expert_capacity,
                                .sequence = options.batch.sequence};
  std::optional<ModelActivations> known = activations_of(model, activations);
  if (!known)
    throw UsageError(concat("the activations of model '", model.name, "' in ", name_of(compute),
                            " are not known; they are for bf16 and fp16, without latent "
                            "attention, multi-token prediction, and windows (sliding_window) "
                            "shorter than a sequence"));
  activations.keeps_codes = true;
  const ModelActivations of_codes = *activations_of(model, activations);
  // The first unit is the embedding.
  for (size_t i = 0; i < known->blocks.size(); ++i)
    if (keeps_codes(groups, static_cast<int64_t>(i) + 1, options.weight_gradient))
      known->blocks[i] = of_codes.blocks[i];
  const std::vector<BlockActivations>& blocks = known->blocks;
  const int64_t element = element_bytes(compute);
  const int64_t tokens = options.batch.tokens();
  const int64_t head = kept_bytes(tokens, kept_by_head(known->hidden_size, compute)) +
                       kept_bytes(known->vocab_size, known->hidden_size, kSumBytes);
  const int64_t hidden = kept_bytes(tokens, known->hidden_size, element);
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
  // The bytes that the blocks before each one keep while none of them is computed again; and all of
  // them.
  std::vector<int64_t> kept_before = {0};
  for (const BlockActivations& block : blocks)
    kept_before.push_back(checked_add(
        kept_before.back(), options.recomputes_blocks ? hidden : block.kept_bytes(tokens)));
  add("the loss", end, kept_before.back() + head,
      hidden + working_of_loss(known->vocab_size, tokens, element, options.logit_bytes));
  add("the backward of the head", end - 1, kept_before.back() + head, hidden);
  // A block that is computed again has its output once more.
  const int64_t again = options.recomputes_blocks ? hidden : 0;
  for (size_t i = blocks.size(); i >= 1; --i)
    add("the backward of a block", static_cast<int64_t>(i),
        kept_before[i - 1] + blocks[i - 1].kept_bytes(tokens),
        hidden + again + blocks[i - 1].working_bytes(tokens));
  // Autograd has the embedding's gradient whole, in the type of the weights, before it is added up.
  add("the backward of the embedding", 0, 0,
      2 * hidden + kept_bytes(known->vocab_size, known->hidden_size, element));
  return *std::max_element(
      moments.begin(), moments.end(),
      [](const PeakForecast& a, const PeakForecast& b) { return a.allocated() < b.allocated(); });
}

}  // namespace fsdp
