#include "fsdp/train/run_data.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/data/byte_tokenizer.h"
#include "fsdp/data/token_header.h"
#include "fsdp/data/tokenizer.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/train/model/model_tokenizer.h"
#include "fsdp/train/model/published_model.h"

namespace fsdp::train {

namespace {

using TokenizerPointer = std::shared_ptr<const Tokenizer>;

bool has_text(const TrainOptions& options) {
  const auto is_text = [](const std::string& path) { return !is_token_file(path); };
  return std::any_of(options.data.begin(), options.data.end(), is_text) ||
         std::any_of(options.validation_data.begin(), options.validation_data.end(), is_text);
}

void check_tokenizer(const RunPlan& plan, const Tokenizer& tokenizer) {
  if (tokenizer.kind().tokenizer == plan.corpus->tokenizer()) return;
  throw UsageError(concat("--tokenizer is '", plan.options.tokenizer, "' (",
                          tokenizer.kind().tokenizer, "), but the data was packed with '",
                          plan.corpus->tokenizer(),
                          "'; give that tokenizer, or pack the data again"));
}

// For packed data; nullptr, with the reason in the plan, where its text cannot be written.
TokenizerPointer tokenizer_for_sample(RunPlan& plan) {
  if (plan.corpus->tokenizer() == kByteTokenizerName) return open_tokenizer(kByteTokenizerName);
  if (plan.tokenizer == kByteTokenizerName) return nullptr;
  try {
    TokenizerPointer tokenizer = open_tokenizer(plan.tokenizer);
    if (tokenizer->kind().tokenizer == plan.corpus->tokenizer()) return tokenizer;
  } catch (const Error& error) {
    // Training needs no tokenizer then.
    plan.no_sample = concat("no sample: ", error.what());
  }
  return nullptr;
}

}  // namespace

void open_data(RunPlan& plan) {
  const TrainOptions& options = plan.options;
  plan.tokenizer = tokenizer_path(options.tokenizer, model_origins(plan));
  TokenizerPointer tokenizer;
  if (options.tokenizer != "auto" || has_text(options)) tokenizer = open_tokenizer(plan.tokenizer);
  const CorpusOptions opening{.tokenizer = tokenizer, .field = options.field};
  plan.corpus = Corpus::open(options.data, opening);
  if (!options.validation_data.empty())
    plan.validation = Corpus::open(options.validation_data, opening);
  std::vector<std::shared_ptr<const Corpus>> opened = {plan.corpus};
  if (plan.validation) opened.push_back(plan.validation);
  plan.data_check = std::make_shared<CorpusCheck>(std::move(opened));
  if (options.tokenizer != "auto") check_tokenizer(plan, *tokenizer);
  if (options.sample.empty()) return;
  if (!tokenizer) tokenizer = tokenizer_for_sample(plan);
  if (!tokenizer) return;
  if (tokenizer->kind().tokenizer == kByteTokenizerName) plan.tokenizer = kByteTokenizerName;
  plan.sample_prompt = tokenizer->encode_prompt(options.sample);
  plan.end_tokens = tokenizer->ends();
}

void fit_vocabulary(RunPlan& plan) {
  constexpr int64_t kMultiple = 64;  // matrices of such sizes are multiplied faster
  ModelConfig& model = plan.model.config;
  const int64_t needed = plan.corpus->vocabulary();
  std::optional<int64_t> wanted = plan.options.vocabulary;
  if (!wanted && find_preset(plan.options.model) != nullptr && vocab_size_of(model) < needed)
    wanted = (needed + kMultiple - 1) / kMultiple * kMultiple;
  if (wanted && *wanted != vocab_size_of(model)) {
    nlohmann::ordered_json config = nlohmann::ordered_json::parse(config_json(model));
    config["vocab_size"] = *wanted;
    model = parse_model_config(config.dump(), plan.model.name);
  }
  plan.resolved.vocabulary = vocab_size_of(model);
  plan.corpus->check_model_vocabulary(vocab_size_of(model));
  if (plan.validation) plan.validation->check_model_vocabulary(vocab_size_of(model));
}

}  // namespace fsdp::train
