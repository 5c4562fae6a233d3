#include "fsdp/plan/peak_forecast.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/state_bytes.h"
#include "fsdp/plan/model_adapters.h"

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

// The embedding and the head of a rank. The ranks of a tp group share the rows of the vocabulary,
// and then have all tokens at the ends; else they have their own, and all rows.
struct VocabularyPart {
  int64_t rows, tokens, hidden;
  int64_t element;

  VocabularyPart(const ModelActivations& model, int64_t all_tokens, const PlanOptions& options)
      : rows(model.vocab_size),
        tokens(ceil_div(all_tokens, options.tp)),
        hidden(model.hidden_size),
        element(element_bytes(options.compute)) {
    if (rows % options.tp != 0) return;
    rows /= options.tp;
    tokens = all_tokens;
  }

  int64_t hidden_bytes() const { return kept_bytes(tokens, hidden, element); }
  int64_t gradient_bytes() const { return kept_bytes(rows, hidden, kSumBytes); }  // of the head
  // The logits of a chunk, which their gradient replaces, and numbers of all tokens.
  int64_t logit_bytes(int64_t most) const {
    const int64_t chunk =
        rows_of_logit_chunk({.rows = tokens, .vocabulary = rows, .element_bytes = element}, most);
    return kept_bytes(chunk, rows, element) + kept_bytes(tokens, kSumsOfLoss, kLogSumBytes);
  }
};

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

// They are known of types in which GPUs compute.
std::optional<ModelActivations> activations_of(const ModelShape& model,
                                               const ActivationOptions& options) {
  const bool is_narrow = options.compute == DType::kBFloat16 || options.compute == DType::kFloat16;
  return model.layers && is_narrow ? activations_of(*model.layers, options) : std::nullopt;
}

// Whether layers of a unit keep codes of their inputs: those of recipes whose products read them.
bool keeps_codes(std::span<const GroupPlan> groups, int64_t unit, ProductForm weight_gradient) {
  return weight_gradient == ProductForm::kQuantized &&
         std::any_of(groups.begin(), groups.end(), [&](const GroupPlan& group) {
           return group.unit == unit && group.types.trainable &&
                  (group.types.recipe == WeightRecipe::kFp8Row ||
                   group.types.recipe == WeightRecipe::kFp8Tensor);
         });
}

}  // namespace

bool knows_activations(const ModelShape& model, DType compute, int64_t sequence) {
  return activations_of(model, {.compute = compute, .sequence = sequence}).has_value();
}

PeakForecast forecast_peak(const ModelShape& model, std::span<const GroupPlan> groups,
                           const Forecast& forecast, const PeakOptions& options) {
  const PlanOptions& plan = forecast.options;
  ActivationOptions activations{.compute = plan.compute,
                                .ep = plan.ep,
                                .tp = plan.tp,
                                .expert_capacity = options.expert_capacity,
                                .pads_experts = options.pads_experts,
                                .rows = options.batch.rows,
                                .sequence = options.batch.sequence};
  std::optional<ModelActivations> known = activations_of(model, activations);
  if (!known)
    throw UsageError(concat("the activations of model '", model.name, "' in ",
                            name_of(plan.compute),
                            " are not known; they are for bf16 and fp16, without windows "
                            "(sliding_window) shorter than a sequence"));
  activations.keeps_codes = true;
  const ModelActivations of_codes = *activations_of(model, activations);
  const size_t head_unit = layers_of(*model.layers).head_unit();
  const auto block_of = [&](size_t unit) { return unit < head_unit ? unit - 1 : unit - 2; };
  for (size_t unit = 1; unit < model.units.size(); ++unit)
    if (unit != head_unit &&
        keeps_codes(groups, static_cast<int64_t>(unit), options.weight_gradient))
      known->blocks[block_of(unit)] = of_codes.blocks[block_of(unit)];
  // Gradients of the vocabulary's matrices are made unless these are frozen.
  const bool learns_vocabulary = !model.units.front().tensors.front().is_frozen;
  for (size_t unit = 1; unit < model.units.size(); ++unit)
    if (const int64_t ranks = adapter_ranks(model.units[unit]); ranks > 0)
      known->blocks[block_of(unit)].kept.push_back(
          {"what adapters made of inputs", ranks, element_bytes(plan.compute)});

  const int64_t element = element_bytes(plan.compute);
  const int64_t all_tokens = options.batch.tokens();
  const int64_t tokens = ceil_div(all_tokens, plan.tp);
  const VocabularyPart vocabulary(*known, all_tokens, plan);
  const int64_t hidden = kept_bytes(tokens, known->hidden_size, element);
  const int64_t head = kept_bytes(tokens, kept_by_head(known->hidden_size, plan.compute)) +
                       (learns_vocabulary ? vocabulary.gradient_bytes() : 0);
  // Beside their own tokens, ranks that share the vocabulary have all, and the gradient of all in
  // place of that of their own.
  const bool shares_vocabulary = vocabulary.tokens > tokens;
  const int64_t all_hidden = shares_vocabulary ? 2 * vocabulary.hidden_bytes() - hidden : 0;
  const std::vector<int64_t> gradients =
      gradients_by_unit(groups, model.units.size(), plan.strategy.gradient);
  PeakForecast moment{.when = {},
                      .state = forecast.bytes.total() - forecast.bytes.main_grad,
                      .workspaces = kWorkspaceBytes,
                      .rounding = rounding_of_state(groups, plan, options.gradient_lifetime),
                      .context = kContextBytes};
  if (options.gradient_lifetime == GradientLifetime::kPersistent)
    moment.gradients = std::accumulate(gradients.begin(), gradients.end(), int64_t{0});
  PeakForecast peak = moment;
  const int64_t batch = 2 * kept_bytes(all_tokens, 1, kTokenBytes);
  const auto consider = [&](std::string_view when, int64_t kept, int64_t working) {
    moment.when = when;
    moment.activations = batch + kept;
    moment.working = working;
    if (moment.allocated() > peak.allocated()) peak = moment;
  };

  // Forward, with what is kept before each use; the embedding of a tied head is a part of its use.
  const bool again = options.recomputes_blocks;
  std::vector<std::pair<size_t, int64_t>> uses;
  int64_t kept = 0;
  for (size_t i = 0; i < model.uses.size(); i = static_cast<size_t>(model.ends[i]) + 1) {
    const auto unit = static_cast<size_t>(model.uses[i]);
    uses.emplace_back(unit, kept);
    if (unit == head_unit) {
      kept += head;
      consider("the loss", kept, hidden + all_hidden + vocabulary.logit_bytes(options.logit_bytes));
    } else if (unit != 0) {
      const BlockActivations& block = known->blocks[block_of(unit)];
      kept += again ? block.inputs * hidden : block.kept_bytes(tokens);
    }
  }
  std::set<size_t> begun;
  for (auto use = uses.rbegin(); use != uses.rend(); ++use) {
    const auto& [unit, before] = *use;
    if (begun.insert(unit).second && options.gradient_lifetime == GradientLifetime::kStep)
      moment.gradients += gradients[unit];
    if (unit == head_unit) {
      consider("the backward of the head", before + head, hidden);
    } else if (unit == 0 && !learns_vocabulary) {
      continue;
    } else if (unit == 0) {
      // Autograd has the embedding's gradient whole, in the type of the weights, before it is added
      // up; ranks that share its rows have zeros for the tokens of others.
      consider("the backward of the embedding", before,
               2 * vocabulary.hidden_bytes() + (shares_vocabulary ? hidden : 0) +
                   kept_bytes(vocabulary.rows, vocabulary.hidden, element));
    } else {
      // A block that is computed again has its output once more.
      const BlockActivations& block = known->blocks[block_of(unit)];
      consider("the backward of a block", before + block.kept_bytes(tokens),
               (again ? 2 : 1) * hidden + block.working_bytes(tokens));
    }
  }
  return peak;
}

}  // namespace fsdp
