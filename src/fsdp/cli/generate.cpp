// `fsdp generate`: lets a trained model write text.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/setting_flags.h"
#include "fsdp/comm/world.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/tokenizer.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/model/trained_model.h"
#include "fsdp/train/run_options.h"
#include "fsdp/train/torch_warnings.h"

namespace fsdp::cli {

namespace {

struct GenerateArguments {
  TrainedModelFlags trained;
  std::string prompt;
  std::string system;
  bool chat = false;
  std::string tokens = "200";
  std::string temperature = "0";
  std::string top_p = "1";
  std::string seed = "1";
};

train::SamplingOptions sampling_options(const GenerateArguments& given) {
  return {.max_tokens = parse_whole_number("--tokens", given.tokens, 1, 1 << 20),
          .temperature = parse_number("--temperature", given.temperature, 0, 100),
          .top_p = parse_number("--top-p", given.top_p, 1e-9, 1),
          .seed = static_cast<uint64_t>(
              parse_whole_number("--seed", given.seed, 0, std::numeric_limits<int64_t>::max()))};
}

// The text that the model continues: the prompt, or a chat that ends with it.
std::vector<int64_t> prompt_tokens(const GenerateArguments& given, const Tokenizer& tokenizer) {
  if (!given.chat) return tokenizer.encode_prompt(given.prompt);
  nlohmann::json messages = nlohmann::json::array();
  if (!given.system.empty()) messages.push_back({{"role", "system"}, {"content", given.system}});
  messages.push_back({{"role", "user"}, {"content", given.prompt}});
  return tokenizer.encode_chat(nlohmann::json{{"messages", messages}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace));
}

std::shared_ptr<const Tokenizer> tokenizer_for(const GenerateArguments& given,
                                               const train::LoadedModel& loaded) {
  const int64_t vocabulary = vocab_size_of(loaded.model->config());
  const std::string path =
      train::tokenizer_path(given.trained.tokenizer, std::span(&loaded.path, 1));
  const bool is_found = given.trained.tokenizer != "auto" || path != kByteTokenizerName;
  if (!is_found && vocabulary != kByteVocabulary)
    throw UsageError(concat("the model has ", vocabulary, " tokens and ", loaded.path,
                            " no tokenizer.json, and bytes are ", kByteVocabulary,
                            " tokens; name the model's tokenizer with --tokenizer"));
  std::shared_ptr<const Tokenizer> tokenizer = open_tokenizer(path);
  if (tokenizer->kind().vocabulary > vocabulary)
    throw UsageError(concat("the tokenizer ", path, " has ", tokenizer->kind().vocabulary,
                            " tokens and the model ", vocabulary,
                            "; name the model's own with --tokenizer"));
  return tokenizer;
}

void run_generate(const GenerateArguments& given) {
  log_warnings_only();
  given.trained.check();
  if (given.prompt.empty()) throw UsageError("--prompt is missing; give some text to begin with");
  if (!given.system.empty() && !given.chat)
    throw UsageError("--system is given without --chat; give both, or put it into --prompt");
  train::SamplingOptions sampling = sampling_options(given);
  run_threads(1, CommOptions::from_environment(), [&](World& world) {
    const train::QuietTorchWarnings quiet;
    const Mesh mesh = world.mesh();
    const train::LoadedModel loaded = train::load_for_inference(given.trained.model, mesh);
    const std::shared_ptr<const Tokenizer> tokenizer = tokenizer_for(given, loaded);
    sampling.max_context = max_positions_of(loaded.model->config());
    sampling.end_tokens = train::stored_end_tokens(loaded.path);
    sampling.end_tokens.insert(sampling.end_tokens.end(), tokenizer->ends().begin(),
                               tokenizer->ends().end());
    const std::vector<int64_t> prompt = prompt_tokens(given, *tokenizer);
    if (!given.chat) std::cout << given.prompt << std::flush;
    tokenizer->begin_text(prompt);
    train::generate(*loaded.model, prompt, sampling, loaded.device, [&](int64_t token) {
      std::cout << tokenizer->next_text(std::span(&token, 1)) << std::flush;
    });
    std::cout << "\n";
  });
}

}  // namespace

Command add_generate(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("generate", "Let a trained model write text");
  app->footer(
      "Examples:\n"
      "  fsdp generate --checkpoint runs/tiny --prompt 'The rank '\n"
      "  fsdp generate --checkpoint runs/tiny --prompt 'A ' --temperature 0.8 --top-p 0.95\n"
      "  fsdp generate --checkpoint Qwen2.5-0.5B-Instruct --prompt 'What is a rank?' --chat");
  const auto given = std::make_shared<GenerateArguments>();
  const auto option = [&](const char* name, std::string& value, const char* type,
                          const char* text) {
    app->add_option(name, value, text)->type_name(type)->capture_default_str();
  };
  given->trained.add(*app);
  option("--prompt", given->prompt, "TEXT", "What the text begins with");
  app->add_flag("--chat", given->chat,
                "The prompt is a user's turn; the model's chat template frames it");
  option("--system", given->system, "TEXT", "With --chat: what the system says first");
  option("--tokens", given->tokens, "N", "At most so many tokens more");
  option("--temperature", given->temperature, "X",
         "0: always the likeliest token; 1: as the model says; between: bolder or safer");
  option("--top-p", given->top_p, "P",
         "Draw only from the likeliest tokens that together have this probability");
  option("--seed", given->seed, "N", "Of the draws");
  return {app, [given] { run_generate(*given); }};
}

}  // namespace fsdp::cli
