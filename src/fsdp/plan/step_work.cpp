#include "fsdp/plan/step_work.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <variant>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// Linear layers of one input: [tokens, in] to [tokens, each of outs].
struct Linears {
  int64_t in = 0;
  std::vector<int64_t> outs;
  bool has_bias = false;
};

// The order of a block's layers does not matter for its time, so layers add to both lists at once.
class BlockWork {
 public:
  explicit BlockWork(const WorkOptions& options)
      : options_(options), tokens_(options.rows * options.sequence) {}

  void pass(const std::string& name, int64_t elements_per_token) {
    work_.forward.push_back({concat(name, " forward"), {tokens_ * elements_per_token}});
    work_.backward.push_back({concat(name, " backward"), {tokens_ * elements_per_token}});
  }

  void linears(const Linears& layer) {
    const bool has_codes = options_.weights != WeightRecipe::kPlain;
    const std::string type(has_codes ? row_of(options_.weights).name : name_of(options_.compute));
    const int64_t input = tokens_ * layer.in;
    if (has_codes) {
      work_.forward.push_back({"codes of rows", {input}});
      work_.backward.push_back({"codes transposed", {input}});
    }
    // Quantised side by side, outputs have one product for their input's gradient.
    const bool is_joined = has_codes && options_.weights != WeightRecipe::kFp8Tensor;
    int64_t all_outs = 0;
    for (const int64_t out : layer.outs) {
      const std::vector<int64_t> sizes = {tokens_, out, layer.in};
      all_outs += out;
      work_.forward.push_back({concat("product ", type, " forward"), sizes});
      if (!is_joined)
        work_.backward.push_back({concat("product ", type, " input gradient"), sizes});
      work_.backward.push_back({concat("product ", type, " weight gradient"), sizes});
      if (has_codes) {
        work_.backward.push_back({"codes of rows and columns", {tokens_ * out}});
        work_.backward.push_back({"codes transposed", {out * layer.in}});
      }
      if (layer.has_bias) work_.backward.push_back({"sum of rows", {tokens_ * out}});
    }
    if (is_joined)
      work_.backward.push_back(
          {concat("product ", type, " input gradient"), {tokens_, all_outs, layer.in}});
    const bool adds_apart = !is_joined && (options_.on_cpu || layer.has_bias || has_codes);
    if (adds_apart && layer.outs.size() > 1)
      work_.backward.push_back({"sum", {input}, static_cast<double>(layer.outs.size() - 1)});
  }

  void attention(const LlamaConfig& c) {
    // Larger groups are as fast as the largest that is measured: their queries decide.
    constexpr int64_t kLargestGroup = 4;
    const int64_t group = c.num_attention_heads / c.num_key_value_heads;
    const std::vector<int64_t> sizes = {options_.rows * c.num_attention_heads, options_.sequence,
                                        head_dim_of(c), std::min(group, kLargestGroup)};
    const std::string type(name_of(options_.compute));
    work_.forward.push_back({concat("attention ", type, " forward"), sizes});
    work_.backward.push_back({concat("attention ", type, " backward"), sizes});
  }

  // The sum around a layer, whose gradient goes both ways as it is.
  void residual(int64_t hidden) { work_.forward.push_back({"sum", {tokens_ * hidden}}); }

  UnitWork done() { return std::move(work_); }

 private:
  const WorkOptions& options_;
  const int64_t tokens_;
  UnitWork work_;
};

UnitWork block_work(const LlamaConfig& c, const WorkOptions& options) {
  const int64_t head_dim = head_dim_of(c);
  const int64_t queries = c.num_attention_heads * head_dim;
  const int64_t keys = c.num_key_value_heads * head_dim;
  BlockWork block(options);
  block.pass("norm", c.hidden_size);
  block.linears({.in = c.hidden_size, .outs = {queries, keys, keys}, .has_bias = has_qkv_bias(c)});
  if (c.qk_norm) {
    block.pass("norm", queries);
    block.pass("norm", keys);
  }
  block.pass("rotary", queries + keys);
  block.attention(c);
  block.linears({.in = queries, .outs = {c.hidden_size}, .has_bias = c.attention_bias});
  block.pass("sum and norm", c.hidden_size);
  block.linears({.in = c.hidden_size,
                 .outs = {c.intermediate_size, c.intermediate_size},
                 .has_bias = c.mlp_bias});
  block.pass("gated silu", c.intermediate_size);
  block.linears({.in = c.intermediate_size, .outs = {c.hidden_size}, .has_bias = c.mlp_bias});
  block.residual(c.hidden_size);
  return block.done();
}

// The loss computes its gradients in the forward, chunk by chunk (nn/layers/head_loss.h).
UnitWork head_work(const LlamaConfig& c, const WorkOptions& options) {
  const int64_t tokens = options.rows * options.sequence;
  const int64_t hidden = tokens * c.hidden_size;
  const int64_t chunk = rows_of_logit_chunk(
      {.rows = tokens, .vocabulary = c.vocab_size, .element_bytes = element_bytes(options.compute)},
      options.logit_bytes);
  const double chunks = static_cast<double>(tokens) / static_cast<double>(chunk);
  const std::vector<int64_t> sizes = {chunk, c.vocab_size, c.hidden_size};
  const std::string type(name_of(options.compute));
  return {.forward = {{"norm forward", {hidden}},
                      {concat("product ", type, " forward"), sizes, chunks},
                      {"cross entropy", {chunk * c.vocab_size}, chunks},
                      {concat("product ", type, " input gradient"), sizes, chunks},
                      {concat("product ", type, " weight gradient"), sizes, chunks}},
          .backward = {{"copy", {hidden}},
                       {"scaled to fp32", {c.vocab_size * c.hidden_size}},
                       {"norm backward", {hidden}}}};
}

UnitWork embedding_work(const LlamaConfig& c, const WorkOptions& options) {
  const int64_t hidden = options.rows * options.sequence * c.hidden_size;
  const int64_t table = c.vocab_size * c.hidden_size;
  return {.forward = {{"embedding forward", {hidden}}},
          .backward = {{"embedding backward", {hidden, table}}, {"copy to fp32", {table}}}};
}

}  // namespace

double us_of(const std::vector<WorkItem>& items, const RateTable& rates) {
  double us = 0.0;
  for (const WorkItem& item : items) us += item.times * rates.us(item.work, item.sizes);
  return us;
}

std::optional<ModelWork> work_of(const ModelConfig& config, const WorkOptions& options) {
  const auto* llama = std::get_if<LlamaConfig>(&config);
  if (llama == nullptr || llama->num_nextn_predict_layers > 0) return std::nullopt;
  if (llama->sliding_window > 0 && llama->sliding_window < options.sequence) return std::nullopt;
  return ModelWork{.embedding = embedding_work(*llama, options),
                   .block = block_work(*llama, options),
                   .head = head_work(*llama, options)};
}

}  // namespace fsdp
