// `fsdp generate`: lets a trained model write text.
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/cli/command.h"
#include "fsdp/comm/world.h"
#include "fsdp/data/byte_tokenizer.h"
#include "fsdp/train/model/text_generation.h"
#include "fsdp/train/model/trained_model.h"
#include "fsdp/train/run_options.h"
#include "fsdp/train/torch_warnings.h"

namespace fsdp::cli {

namespace {

struct GenerateArguments {
  std::string checkpoint;
  std::string model;
  std::string prompt;
  std::string tokens = "200";
  std::string temperature = "0";
  std::string top_p = "1";
  std::string seed = "1";
  std::string device = "auto";
  std::string compute = "auto";
};

train::SamplingOptions sampling_options(const GenerateArguments& given) {
  return {.max_tokens = parse_whole_number("--tokens", given.tokens, 1, 1 << 20),
          .temperature = parse_number("--temperature", given.temperature, 0, 100),
          .top_p = parse_number("--top-p", given.top_p, 1e-9, 1),
          .seed = static_cast<uint64_t>(
              parse_whole_number("--seed", given.seed, 0, std::numeric_limits<int64_t>::max())),
          .end_token = kByteEndOfDocument};
}

void run_generate(const GenerateArguments& given) {
  log_warnings_only();
  if (given.checkpoint.empty())
    throw UsageError(
        "--checkpoint is missing; give a run's directory, a checkpoint, or a "
        "directory of safetensors files");
  if (given.prompt.empty()) throw UsageError("--prompt is missing; give some text to begin with");
  train::SamplingOptions sampling = sampling_options(given);
  const train::InferenceOptions inference{.path = given.checkpoint,
                                          .model = given.model,
                                          .device = given.device,
                                          .compute = given.compute};
  run_threads(1, CommOptions::from_environment(), [&](World& world) {
    const train::QuietTorchWarnings quiet;
    const Mesh mesh = world.mesh();
    const train::LoadedModel loaded = train::load_for_inference(inference, mesh);
    const int64_t vocabulary = vocab_size_of(loaded.model->config());
    if (vocabulary != kByteVocabulary)
      throw UsageError(concat("the model has ", vocabulary, " tokens, but text is made of bytes (",
                              kByteVocabulary,
                              " tokens); models of other tokenizers can be exported with fsdp "
                              "convert --to hf and run by HuggingFace's packages"));
    sampling.max_context = max_positions_of(loaded.model->config());
    std::vector<int64_t> prompt(given.prompt.size());
    encode_bytes(given.prompt, std::span(prompt));
    std::cout << given.prompt << std::flush;
    train::generate(*loaded.model, prompt, sampling, loaded.device, [](int64_t token) {
      std::cout << decode_bytes(std::span(&token, 1)) << std::flush;
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
      "  fsdp generate --checkpoint runs/tiny --prompt 'A ' --temperature 0.8 --top-p 0.95");
  const auto given = std::make_shared<GenerateArguments>();
  const auto option = [&](const char* name, std::string& value, const char* type,
                          const char* text) {
    app->add_option(name, value, text)->type_name(type)->capture_default_str();
  };
  option("--checkpoint", given->checkpoint, "PATH",
         "A run's directory (its latest checkpoint), a checkpoint, or safetensors files");
  option("--prompt", given->prompt, "TEXT", "What the text begins with");
  option("--tokens", given->tokens, "N", "At most so many tokens more");
  option("--temperature", given->temperature, "X",
         "0: always the likeliest token; 1: as the model says; between: bolder or safer");
  option("--top-p", given->top_p, "P",
         "Draw only from the likeliest tokens that together have this probability");
  option("--seed", given->seed, "N", "Of the draws");
  option("--model", given->model, "NAME|PATH",
         "The model, where the checkpoint has no config.json");
  option("--device", given->device, "NAME", "auto, cpu or cuda");
  option("--compute", given->compute, "DTYPE", "auto: fp32 on CPUs, bf16 on GPUs");
  return {app, [given] { run_generate(*given); }};
}

}  // namespace fsdp::cli
