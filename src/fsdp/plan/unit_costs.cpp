#include "fsdp/plan/unit_costs.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/plan/flops.h"

namespace fsdp {

namespace {

enum class UnitKind : uint8_t { kEmbedding, kBlock, kHead };

UnitKind kind_of(const ModelShape& model, size_t unit) {
  if (unit == 0) return UnitKind::kEmbedding;
  return model.units[unit].name == "lm_head" ? UnitKind::kHead : UnitKind::kBlock;
}

// Operations, and bytes that are read and written beside products.
struct Work {
  double flops = 0;
  double bytes = 0;
};
struct UnitWork {
  Work forward, backward;
};

// A model's units on one rank. The ranks of a tp group share its tokens or its
// matrices: either way each has its part of the products.
class Roofline {
 public:
  Roofline(const ModelShape& model, const PlanOptions& options, const BatchShape& batch)
      : model_(model),
        layers_(layers_of(*model.layers)),
        tp_(static_cast<double>(options.tp)),
        ep_(static_cast<double>(options.ep)),
        element_(static_cast<double>(element_bytes(options.compute))),
        tokens_(static_cast<double>(batch.tokens()) / tp_),
        hidden_(static_cast<double>(layers_.hidden_size)),
        vocabulary_(static_cast<double>(layers_.vocab_size)),
        passes_(options.weights == WeightRecipe::kPlain ? 1.0 : kPassesOfCodes),
        sequence_(batch.sequence) {}

  UnitWork of(size_t unit) const {
    const UnitKind kind = kind_of(model_, unit);
    if (kind == UnitKind::kEmbedding) return embedding();
    return kind == UnitKind::kHead ? head() : block(unit);
  }

 private:
  // Operations of attention and of scans reach about this share of what products reach.
  static constexpr double kMixingShare = 0.6;
  // Codes are made in passes of their own.
  static constexpr double kPassesOfCodes = 1.5;

  // The operations around a product read its input and write its output about once; its weight is
  // read.
  UnitWork block(size_t unit) const {
    Work forward{.flops = 2 * tokens_ * mixing_products(layers_.block_of_unit(unit), sequence_) /
                          kMixingShare};
    double of_gradients = 0;
    double of_frozen = 0;  // operations that would make gradients of weights
    for (const TensorShape& tensor : model_.units[unit].tensors) {
      const double products = multiplied_elements(tensor);
      if (products == 0.0) continue;
      const auto whole = static_cast<double>(tensor.numel());
      const auto in = static_cast<double>(tensor.shape.back());
      const bool is_of_experts = tensor.num_experts > 0;
      const double each = is_of_experts ? whole / static_cast<double>(tensor.num_experts) : whole;
      const double rows = tokens_ * products / each;
      // A grouped product rounds the gradient of a weight, which then goes to fp32.
      if (is_of_experts && !tensor.is_frozen) of_gradients += (2 * element_ + 4) * whole / ep_;
      forward.flops += 2 * tokens_ * products;
      if (tensor.is_frozen) of_frozen += 2 * tokens_ * products;
      forward.bytes +=
          element_ * (passes_ * rows * (in + each / in) + whole / (is_of_experts ? ep_ : tp_));
    }
    return {forward, {2 * forward.flops - of_frozen, 2 * forward.bytes + of_gradients}};
  }

  // The loss computes its gradients in the forward (nn/layers/head_loss.h), logits twice.
  UnitWork head() const {
    const double of_hidden = element_ * tokens_ * hidden_;
    const double of_weight = vocabulary_ * hidden_ / tp_;
    return {{6 * tokens_ * vocabulary_ * hidden_,
             element_ * 4 * tokens_ * vocabulary_ + 4 * of_hidden + 8 * of_weight},
            {0, 4 * of_hidden + 8 * of_weight}};
  }

  // The gradient of the table is zeros but for the rows of tokens, which are sorted, and then goes
  // to fp32: about three times as long as a pass.
  UnitWork embedding() const {
    const double of_hidden = element_ * tokens_ * hidden_;
    return {{0, 2 * of_hidden},
            {0, 3 * of_hidden + 3 * vocabulary_ * hidden_ / tp_ * (2 * element_ + 4)}};
  }

  const ModelShape& model_;
  const ModelLayers layers_;
  const double tp_;
  const double ep_;
  const double element_;  // bytes
  const double tokens_;   // of this rank
  const double hidden_;
  const double vocabulary_;
  const double passes_;
  const int64_t sequence_;
};

double us_of(const Work& work, double flops_per_s, double bytes_per_s) {
  return 1e6 * (work.flops / flops_per_s + work.bytes / bytes_per_s);
}

// --- exchanges -----------------------------------------------------------------------------------

// Tokens come together before layers that are cut by outputs, and sums go apart after those that
// are cut by inputs, which are as many. Own tokens are kept, so the backward gathers them again.
void add_token_exchanges(UnitCost& cost, const UnitShape& unit, const PlanOptions& options,
                         int64_t tokens) {
  const auto add = [](std::vector<Exchange>& pass, const char* collective, int64_t bytes) {
    pass.push_back({ExchangeAxis::kTensor, collective, bytes});
  };
  for (const TensorShape& tensor : unit.tensors) {
    const bool is_cut_by_inputs =
        tensor.shape.size() == 2 && tensor.cut && tensor.cut->dim == 1 && tensor.num_experts == 0;
    if (!is_cut_by_inputs) continue;
    const int64_t numel = tokens * tensor.shape[0];
    const int64_t bytes = numel * element_bytes(options.compute);
    // Codes of rows travel as such, a byte each.
    const int64_t gathered = options.weights == WeightRecipe::kFp8Row ? numel : bytes;
    add(cost.forward, "all_gather", gathered);
    add(cost.forward, "reduce_scatter", bytes);
    add(cost.backward, "all_gather", bytes);
    add(cost.backward, "all_gather", gathered);
    add(cost.backward, "reduce_scatter", bytes);
  }
}

// Rows go to their experts and back, in both directions: all that there is room for, or those that
// are chosen.
void add_expert_exchanges(UnitCost& cost, const TensorShape& experts, const PlanOptions& options,
                          const PeakOptions& batch, bool on_cpu) {
  const double rows = rows_per_token(experts.num_chosen, experts.num_experts,
                                     {.ep = options.ep,
                                      .expert_capacity = on_cpu ? 0.0 : batch.expert_capacity,
                                      .pads_experts = batch.pads_experts && !on_cpu});
  const int64_t tokens = batch.batch.tokens() / options.tp;
  const int64_t bytes = std::llround(rows * static_cast<double>(tokens)) * experts.shape.back() *
                        element_bytes(options.compute);
  for (std::vector<Exchange>* pass : {&cost.forward, &cost.backward})
    pass->insert(pass->end(), 2, {ExchangeAxis::kExpert, "all_to_all", bytes});
}

void add_exchanges(UnitCost& cost, const ModelShape& model, size_t unit, const PlanOptions& options,
                   const PeakOptions& batch, bool on_cpu) {
  const UnitShape& shape = model.units[unit];
  const UnitKind kind = kind_of(model, unit);
  const int64_t tokens = batch.batch.tokens();
  if (options.tp > 1 && kind == UnitKind::kBlock) add_token_exchanges(cost, shape, options, tokens);
  // Ranks that cannot share the vocabulary evenly have their own tokens alone.
  if (options.tp > 1 && kind != UnitKind::kBlock &&
      vocab_size_of(*model.layers) % options.tp == 0) {
    const int64_t bytes =
        tokens * model.units[0].tensors[0].shape.back() * element_bytes(options.compute);
    const bool is_head = kind == UnitKind::kHead;
    cost.forward = {{ExchangeAxis::kTensor, "reduce_scatter", bytes}};
    (is_head ? cost.forward : cost.backward)
        .push_back({ExchangeAxis::kTensor, "all_gather", bytes});
  }
  const auto experts = std::ranges::find_if(
      shape.tensors, [](const TensorShape& tensor) { return tensor.num_experts > 0; });
  if (options.ep > 1 && experts != shape.tensors.end())
    add_expert_exchanges(cost, *experts, options, batch, on_cpu);
}

// --- measured parts ------------------------------------------------------------------------------

const PassTimes& times_of(const MeasuredParts& parts, UnitKind kind) {
  return kind == UnitKind::kEmbedding ? parts.embedding
         : kind == UnitKind::kBlock   ? parts.block
                                      : parts.head;
}

double distance(const MeasuredParts& parts, const BatchShape& batch) {
  const auto ratio = [](int64_t a, int64_t b) {
    return std::abs(std::log(static_cast<double>(a) / static_cast<double>(b)));
  };
  return ratio(parts.rows * parts.sequence, batch.tokens()) + ratio(parts.sequence, batch.sequence);
}

// Those of the most similar batch; nullptr: the model was not measured.
const MeasuredParts* nearest_parts(const ModelShape& model, const std::string& products,
                                   const BatchShape& batch, const Rates& rates) {
  const std::string shape = shape_text(*model.layers);
  const MeasuredParts* nearest = nullptr;
  for (const MeasuredParts& parts : rates.parts)
    if (!shape.empty() && parts.shape == shape && parts.products == products &&
        (nearest == nullptr || distance(parts, batch) < distance(*nearest, batch)))
      nearest = &parts;
  return nearest;
}

std::string shape_text(const LlamaConfig& c) {
  if (c.num_nextn_predict_layers > 0) return "";
  return concat("hidden ", c.hidden_size, ", inner ", c.intermediate_size, ", ",
                c.num_attention_heads, " heads of ", head_dim_of(c), " with ",
                c.num_key_value_heads, " keys, vocabulary ", c.vocab_size,
                c.tie_word_embeddings ? " tied" : "", has_qkv_bias(c) ? ", qkv bias" : "",
                c.attention_bias ? ", attention bias" : "", c.mlp_bias ? ", mlp bias" : "",
                c.qk_norm ? ", qk norm" : "",
                c.sliding_window > 0 ? concat(", window ", c.sliding_window) : "");
}

std::string shape_text(const MixtralConfig& c) {
  const std::string decoder = shape_text(c.decoder);
  return decoder.empty() ? ""
                         : concat(decoder, ", ", c.num_experts_per_tok, " of ", c.num_local_experts,
                                  " experts, shared ", c.shared_expert_intermediate_size);
}

}  // namespace

std::string shape_text(const ModelConfig& config) {
  if (const auto* llama = std::get_if<LlamaConfig>(&config)) return shape_text(*llama);
  if (const auto* mixtral = std::get_if<MixtralConfig>(&config)) return shape_text(*mixtral);
  return "";
}

std::string products_name(DType compute, WeightRecipe weights) {
  return std::string(weights == WeightRecipe::kPlain ? name_of(compute) : row_of(weights).name);
}

ModelCosts costs_of(const ModelShape& model, const PlanOptions& options, const PeakOptions& batch,
                    const Rates& rates) {
  if (!model.layers)
    throw UsageError(concat("the time of model '", model.name,
                            "' is not known: a list of shapes does not say what its layers "
                            "compute; give a config.json, or plan without --rates"));
  const std::string products = products_name(options.compute, options.weights);
  const double flops = rates.flops(products);
  // The head and whatever else is not quantised multiplies numbers.
  const double plain_flops = rates.flops(products_name(options.compute, WeightRecipe::kPlain));
  const MeasuredParts* const parts = nearest_parts(model, products, batch.batch, rates);
  ModelCosts costs;
  if (parts != nullptr) {
    costs.measured = {.rows = parts->rows, .sequence = parts->sequence};
    const bool is_same = parts->rows == batch.batch.rows &&
                         parts->sequence == batch.batch.sequence && options.tp == 1 &&
                         options.ep == 1;
    costs.source = is_same ? CostSource::kMeasured : CostSource::kScaled;
    costs.muon_flops_per_s = parts->muon_flops_per_s;
  }
  if (options.muon && costs.muon_flops_per_s == 0)
    costs.muon_flops_per_s = rates.flops(concat("muon ", name_of(*options.muon)));
  PlanOptions alone = options;
  alone.tp = alone.ep = 1;
  const Roofline roofline(model, options, batch.batch);
  const Roofline of_parts(model, alone, parts == nullptr ? batch.batch : costs.measured);
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const UnitKind kind = kind_of(model, unit);
    const bool is_block = kind == UnitKind::kBlock;
    const auto us = [&](const Work& work) {
      return us_of(work, is_block ? flops : plain_flops, rates.bytes_per_s);
    };
    const UnitWork work = roofline.of(unit);
    UnitCost cost{.compute = {us(work.forward), us(work.backward)}};
    if (parts != nullptr) {
      const UnitWork measured = of_parts.of(unit);
      const PassTimes& times = times_of(*parts, kind);
      cost.compute.forward *= times.forward / us(measured.forward);
      cost.compute.backward *= times.backward / us(measured.backward);
    }
    if (is_block)
      cost.host_us =
          parts != nullptr && parts->host_us > 0
              ? parts->host_us
              : rates.host_us_per_tensor * static_cast<double>(model.units[unit].tensors.size());
    add_exchanges(cost, model, unit, options, batch, rates.device == "cpu");
    costs.units.push_back(std::move(cost));
  }
  return costs;
}

double reached_flops_per_s(const ModelShape& model, const PlanOptions& options,
                           const PeakOptions& batch, const PassTimes& block, double bytes_per_s) {
  const UnitWork work = Roofline(model, options, batch.batch).of(1);
  const double us = block.forward + block.backward -
                    1e6 * (work.forward.bytes + work.backward.bytes) / bytes_per_s;
  // Passes that are as slow as all of it leave at least half of the time to products.
  const double of_products = std::max(us, (block.forward + block.backward) / 2);
  return 1e6 * (work.forward.flops + work.backward.flops) / of_products;
}

}  // namespace fsdp
