// `fsdp eval`: how well a trained model predicts text.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/setting_flags.h"
#include "fsdp/comm/world.h"
#include "fsdp/data/corpus.h"
#include "fsdp/data/tokenizer.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/model/trained_model.h"
#include "fsdp/train/settings/settings.h"
#include "fsdp/train/torch_warnings.h"

namespace fsdp::cli {

namespace {

struct EvalArguments {
  TrainedModelFlags trained;
  std::vector<std::string> data;
  std::string field;
  std::string sequence = "auto";
  std::string batch = "16";
  std::string batches = "0";
  std::string documents = "auto";
  std::string ranks = "1";
  bool json = false;
};

void print(const EvalArguments& given, const train::Evaluation& result, const Corpus& corpus) {
  const double loss = result.mean.loss;
  const double bits = loss / std::log(2.0);
  const bool has_bytes = corpus.tokenizer() == kByteTokenizerName;
  if (given.json) {
    return print_json({{"checkpoint", result.path},
                       {"step", result.step},
                       {"loss", loss},
                       {"perplexity", std::exp(loss)},
                       {"bits_per_token", bits},
                       {"tokens", result.mean.tokens}});
  }
  std::printf("checkpoint   %s\n", result.path.c_str());
  std::printf("data         %s\n", corpus.summary().c_str());
  std::printf("tokens       %s\n", grouped_text(result.mean.tokens).c_str());
  std::printf("loss         %.4f\n", loss);
  std::printf("perplexity   %.3f\n", std::exp(loss));
  std::printf("%s  %.3f\n", has_bytes ? "bits per byte" : "bits per token", bits);
}

std::shared_ptr<const Corpus> open_corpus(const EvalArguments& given) {
  CorpusOptions options{.field = given.field};
  const auto is_packed = [](const std::string& path) { return is_token_file(path); };
  // Packed data needs no tokenizer, and so no Python.
  if (!std::all_of(given.data.begin(), given.data.end(), is_packed)) {
    const std::string checkpoint = checkpoint_or_files(given.trained.model.path);
    options.tokenizer =
        open_tokenizer(train::tokenizer_path(given.trained.tokenizer, std::span(&checkpoint, 1)));
  }
  auto corpus = Corpus::open(given.data, options);
  corpus->check_learnt();
  return corpus;
}

void run_eval(const EvalArguments& given) {
  log_warnings_only();
  given.trained.check();
  if (given.data.empty())
    throw UsageError("--data is missing; give text files, directories or token files");
  const auto ranks = static_cast<int>(parse_whole_number("--ranks", given.ranks, 1, 4096));
  const OptionFlag words{.absent = "auto"};
  std::optional<WindowDocuments> documents;
  read_option("--documents", {given.documents}, documents, words);
  const train::EvaluationOptions options{
      .sequence = given.sequence == "auto"
                      ? 0
                      : parse_whole_number("--sequence", given.sequence, 1, 1 << 24),
      .batch = parse_whole_number("--batch", given.batch, 1, 1 << 30),
      .max_batches = parse_whole_number("--batches", given.batches, 0, int64_t{1} << 40),
      .documents = documents};
  if (options.batch % ranks != 0)
    throw UsageError(concat("--batch is ", options.batch, ", which ", ranks,
                            " ranks cannot share evenly; give a multiple of ", ranks));
  const std::shared_ptr<const Corpus> corpus = open_corpus(given);
  run_threads(ranks, CommOptions::from_environment(), [&](World& world) {
    const train::QuietTorchWarnings quiet;
    const train::Evaluation result = train::evaluate(given.trained.model, corpus, options, world);
    if (world.rank() == 0) print(given, result, *corpus);
  });
}

}  // namespace

Command add_eval(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("eval", "Measure how well a trained model predicts text");
  app->footer("Example:\n  fsdp eval --checkpoint runs/tiny --data docs");
  const auto given = std::make_shared<EvalArguments>();
  const auto option = [&](const char* name, auto& value, const char* type, const char* text) {
    return app->add_option(name, value, text)->type_name(type)->capture_default_str();
  };
  given->trained.add(*app);
  option("--data", given->data, "PATH...",
         "Text files, JSON lines, parquet files, directories, or token files");
  option("--field", given->field, "NAME",
         "Rows of JSON lines or parquet have their text in this field");
  option("--sequence", given->sequence, "N|auto", "Tokens per sequence; auto: as it was trained");
  option("--batch", given->batch, "N", "Sequences at a time, of all ranks");
  option("--batches", given->batches, "N",
         "At most so many batches; 0: all whole ones of the data");
  option("--documents", given->documents, "HOW", "auto, joined or separate, as in training");
  option("--ranks", given->ranks, "N", "Ranks as threads of this process");
  app->add_flag("--json", given->json, "Print JSON instead of a table");
  return {app, [given] { run_eval(*given); }};
}

}  // namespace fsdp::cli
