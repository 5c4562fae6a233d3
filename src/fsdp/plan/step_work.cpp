#include "fsdp/plan/step_work.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <variant>

#include "fsdp/base/text.h"
#include "fsdp/plan/activations.h"

namespace fsdp {

namespace {

// How the ranks of a tp group share a layer (nn/layers/tensor_ranks.h).
enum class Cut : uint8_t {
  kNone,     // each has tokens of its own
  kOutputs,  // tokens are gathered, each computes some outputs of all
  kInputs,   // parts of sums, of which each keeps its tokens
};

// Linear layers of one input: [tokens, in] to [tokens, each of outs].
struct Linears {
  int64_t in = 0;
  std::vector<int64_t> outs;
  bool has_bias = false;
  Cut cut = Cut::kNone;
};

// The order of a block's layers does not matter for its time, so layers add to both lists at once.
class BlockWork {
 public:
  explicit BlockWork(const WorkOptions& options)
      : options_(options), tokens_(options.rows * options.sequence), own_(tokens_ / options.tp) {}

  // Over elements of each own token: as many as over a rank's part of the elements of all tokens.
  void pass(const std::string& name, int64_t elements_per_token) {
    add_pass(name, own_ * elements_per_token);
  }

  void linears(const Linears& layer) {
    const bool is_cut = layer.cut != Cut::kNone;
    const int64_t tokens = is_cut ? tokens_ : own_;
    const int64_t in = layer.cut == Cut::kInputs ? layer.in / options_.tp : layer.in;
    const bool has_codes = options_.weights != WeightRecipe::kPlain;
    const std::string type(has_codes ? row_of(options_.weights).name : name_of(options_.compute));
    if (has_codes) {
      forward("codes of rows", {(layer.cut == Cut::kOutputs ? own_ : tokens) * in});
      backward("codes transposed", {tokens * in});
    }
    // Quantised side by side, outputs have one product for their input's gradient.
    const bool is_joined = has_codes && options_.weights != WeightRecipe::kFp8Tensor;
    int64_t all_outs = 0;
    for (const int64_t whole_out : layer.outs) {
      const int64_t out = layer.cut == Cut::kOutputs ? whole_out / options_.tp : whole_out;
      const std::vector<int64_t> sizes = {tokens, out, in};
      all_outs += out;
      forward(concat("product ", type, " forward"), sizes);
      if (!is_joined) backward(concat("product ", type, " input gradient"), sizes);
      backward(concat("product ", type, " weight gradient"), sizes);
      if (has_codes) {
        backward("codes of rows and columns", {tokens * out});
        backward("codes transposed", {out * in});
      }
      if (layer.has_bias)
        backward("sum of rows", {(layer.cut == Cut::kInputs ? own_ : tokens) * out});
    }
    if (is_joined) backward(concat("product ", type, " input gradient"), {tokens, all_outs, in});
    const bool adds_apart = !is_joined && (options_.on_cpu || layer.has_bias || has_codes);
    if (adds_apart && layer.outs.size() > 1)
      backward("sum", {tokens * in}, static_cast<double>(layer.outs.size() - 1));
    exchange_tokens(layer, all_outs);
  }

  void attention(const LlamaConfig& c) {
    // Larger groups are as fast as the largest that is measured: their queries decide.
    constexpr int64_t kLargestGroup = 4;
    const int64_t group = c.num_attention_heads / c.num_key_value_heads;
    const std::vector<int64_t> sizes = {options_.rows * c.num_attention_heads / options_.tp,
                                        options_.sequence, head_dim_of(c),
                                        std::min(group, kLargestGroup)};
    const std::string type(name_of(options_.compute));
    forward(concat("attention ", type, " forward"), sizes);
    backward(concat("attention ", type, " backward"), sizes);
  }

  // The sum around a layer, whose gradient goes both ways as it is.
  void residual(int64_t hidden) { forward("sum", {own_ * hidden}); }

  // The router, rows to experts and back, and their MLPs.
  void experts(const MixtralConfig& c) {
    const int64_t hidden = c.decoder.hidden_size;
    const int64_t inner = c.decoder.intermediate_size;
    const int64_t chosen = c.num_experts_per_tok;
    const int64_t here = c.num_local_experts / options_.ep;  // experts of a rank
    const int64_t rows = own_ * chosen;                      // that they multiply
    const int64_t slots = slots_of(c);                       // that there is room for
    add_both("router", {own_, c.num_local_experts, hidden});
    add_both("dispatch", {slots * hidden, chosen});
    add_both("combine", {rows * hidden, chosen});
    const std::string product = concat("grouped product ", name_of(options_.compute));
    add_both(product, {rows, here, 2 * inner, hidden});
    add_both(product, {rows, here, hidden, inner});
    add_pass("gated silu", slots * inner);
    // A grouped product rounds the gradient of a weight, which then goes to its fp32 slab.
    if (!options_.on_cpu) backward("copy to fp32", {3 * here * inner * hidden});
    if (options_.ep == 1) return;
    for (PassWork* pass : {&work_.forward, &work_.backward}) {
      // What arrives is put in the order of experts, and what goes back in that of ranks.
      pass->items.push_back({"dispatch forward", {slots * hidden, chosen}, 2.0});
      for (int i = 0; i < 2; ++i)
        pass->exchanges.push_back({ExchangeAxis::kExpert, "all_to_all",
                                   slots * hidden * element_bytes(options_.compute)});
    }
  }

  UnitWork done() { return std::move(work_); }

 private:
  void forward(std::string work, std::vector<int64_t> sizes) {
    work_.forward.items.push_back({std::move(work), std::move(sizes)});
  }
  void backward(std::string work, std::vector<int64_t> sizes, double times = 1.0) {
    work_.backward.items.push_back({std::move(work), std::move(sizes), times});
  }
  void add_both(const std::string& name, const std::vector<int64_t>& sizes) {
    forward(concat(name, " forward"), sizes);
    backward(concat(name, " backward"), sizes);
  }
  void add_pass(const std::string& name, int64_t elements) { add_both(name, {elements}); }

  // Tokens come together before layers that are cut by outputs, and sums go apart after those that
  // are cut by inputs. Own tokens are kept, so the backward gathers them again.
  void exchange_tokens(const Linears& layer, int64_t all_outs) {
    if (options_.tp == 1 || layer.cut == Cut::kNone) return;
    const int64_t element = element_bytes(options_.compute);
    const auto add = [](PassWork& pass, const char* collective, int64_t bytes) {
      pass.exchanges.push_back({ExchangeAxis::kTensor, collective, bytes});
    };
    if (layer.cut == Cut::kOutputs) {
      // Codes of rows travel as such, a byte each.
      const bool has_codes = options_.weights == WeightRecipe::kFp8Row;
      const int64_t gathered = tokens_ * layer.in * (has_codes ? 1 : element);
      add(work_.forward, "all_gather", gathered);
      add(work_.backward, "all_gather", gathered);
      add(work_.backward, "reduce_scatter", tokens_ * layer.in * element);
    } else {
      add(work_.forward, "reduce_scatter", tokens_ * all_outs * element);
      add(work_.backward, "all_gather", tokens_ * all_outs * element);
    }
  }

  // On a device rows have room for all that could come; a host knows how many do.
  int64_t slots_of(const MixtralConfig& c) const {
    if (options_.on_cpu) return own_ * c.num_experts_per_tok;
    const double per_token =
        rows_per_token(c.num_experts_per_tok, c.num_local_experts,
                       {.ep = options_.ep, .expert_capacity = options_.expert_capacity});
    return std::llround(per_token * static_cast<double>(own_));
  }

  const WorkOptions& options_;
  const int64_t tokens_;  // of a tp group
  const int64_t own_;     // of this rank
  UnitWork work_;
};

UnitWork block_work(const LlamaConfig& c, const MixtralConfig* mixture,
                    const WorkOptions& options) {
  const int64_t head_dim = head_dim_of(c);
  const int64_t queries = c.num_attention_heads * head_dim;
  const int64_t keys = c.num_key_value_heads * head_dim;
  BlockWork block(options);
  const auto mlp = [&](int64_t inner, bool has_bias, bool is_cut) {
    block.linears({.in = c.hidden_size,
                   .outs = {inner, inner},
                   .has_bias = has_bias,
                   .cut = is_cut ? Cut::kOutputs : Cut::kNone});
    block.pass("gated silu", inner);
    block.linears({.in = inner,
                   .outs = {c.hidden_size},
                   .has_bias = has_bias,
                   .cut = is_cut ? Cut::kInputs : Cut::kNone});
  };
  block.pass("norm", c.hidden_size);
  block.linears({.in = c.hidden_size,
                 .outs = {queries, keys, keys},
                 .has_bias = has_qkv_bias(c),
                 .cut = Cut::kOutputs});
  if (c.qk_norm) {
    block.pass("norm", queries);
    block.pass("norm", keys);
  }
  block.pass("rotary", queries + keys);
  block.attention(c);
  block.linears(
      {.in = queries, .outs = {c.hidden_size}, .has_bias = c.attention_bias, .cut = Cut::kInputs});
  block.pass("sum and norm", c.hidden_size);
  if (mixture == nullptr) {
    mlp(c.intermediate_size, c.mlp_bias, /*is_cut=*/true);
  } else {
    block.experts(*mixture);
    if (const int64_t shared = mixture->shared_expert_intermediate_size; shared > 0) {
      mlp(shared, /*has_bias=*/false, /*is_cut=*/false);
      block.residual(c.hidden_size);
    }
  }
  block.residual(c.hidden_size);
  return block.done();
}

// Whether the ranks of a tp group share the vocabulary; else each has its tokens alone.
bool shares_vocabulary(const LlamaConfig& c, const WorkOptions& options) {
  return options.tp > 1 && c.vocab_size % options.tp == 0;
}

std::vector<Exchange> token_exchanges(std::initializer_list<const char*> collectives,
                                      const LlamaConfig& c, const WorkOptions& options) {
  std::vector<Exchange> exchanges;
  if (shares_vocabulary(c, options))
    for (const char* collective : collectives)
      exchanges.push_back(
          {ExchangeAxis::kTensor, collective,
           options.rows * options.sequence * c.hidden_size * element_bytes(options.compute)});
  return exchanges;
}

// The loss computes its gradients in the forward, chunk by chunk (nn/layers/head_loss.h).
UnitWork head_work(const LlamaConfig& c, const WorkOptions& options) {
  const int64_t own = options.rows * options.sequence / options.tp;
  const bool is_shared = shares_vocabulary(c, options);
  const int64_t tokens = is_shared ? own * options.tp : own;
  const int64_t words = is_shared ? c.vocab_size / options.tp : c.vocab_size;
  const int64_t hidden = own * c.hidden_size;
  const int64_t chunk = rows_of_logit_chunk(
      {.rows = tokens, .vocabulary = words, .element_bytes = element_bytes(options.compute)},
      options.logit_bytes);
  const double chunks = static_cast<double>(tokens) / static_cast<double>(chunk);
  const std::vector<int64_t> sizes = {chunk, words, c.hidden_size};
  const std::string type(name_of(options.compute));
  UnitWork work{.forward = {{{"norm forward", {hidden}},
                             {concat("product ", type, " forward"), sizes, chunks},
                             {"cross entropy", {chunk * words}, chunks},
                             {concat("product ", type, " input gradient"), sizes, chunks},
                             {concat("product ", type, " weight gradient"), sizes, chunks}},
                            token_exchanges({"all_gather", "reduce_scatter"}, c, options)},
                .backward = {{{"copy", {hidden}},
                              {"scaled to fp32", {words * c.hidden_size}},
                              {"norm backward", {hidden}}}}};
  return work;
}

UnitWork embedding_work(const LlamaConfig& c, const WorkOptions& options) {
  const bool is_shared = shares_vocabulary(c, options);
  const int64_t tokens = options.rows * options.sequence / (is_shared ? 1 : options.tp);
  const int64_t hidden = tokens * c.hidden_size;
  const int64_t table = c.vocab_size * c.hidden_size / (is_shared ? options.tp : 1);
  UnitWork work{.forward = {{{"embedding forward", {hidden}}},
                            token_exchanges({"reduce_scatter"}, c, options)},
                .backward = {{{"embedding backward", {hidden, table}}, {"copy to fp32", {table}}},
                             token_exchanges({"all_gather"}, c, options)}};
  // Zeros where another rank has a token's row.
  if (is_shared)
    for (PassWork* pass : {&work.forward, &work.backward})
      pass->items.push_back({"copy", {hidden}});
  return work;
}

}  // namespace

double us_of(const std::vector<WorkItem>& items, const RateTable& rates) {
  double us = 0.0;
  for (const WorkItem& item : items) us += item.times * rates.us(item.work, item.sizes);
  return us;
}

std::optional<ModelWork> work_of(const ModelConfig& config, const WorkOptions& options) {
  const auto* mixture = std::get_if<MixtralConfig>(&config);
  const auto* llama = mixture != nullptr ? &mixture->decoder : std::get_if<LlamaConfig>(&config);
  if (llama == nullptr || llama->num_nextn_predict_layers > 0) return std::nullopt;
  if (llama->sliding_window > 0 && llama->sliding_window < options.sequence) return std::nullopt;
  if (mixture != nullptr && options.weights != WeightRecipe::kPlain) return std::nullopt;
  return ModelWork{.embedding = embedding_work(*llama, options),
                   .block = block_work(*llama, mixture, options),
                   .head = head_work(*llama, options)};
}

}  // namespace fsdp
