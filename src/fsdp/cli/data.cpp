// `fsdp data`: packs text into token files and describes data.
#include <algorithm>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/progress.h"
#include "fsdp/data/corpus.h"
#include "fsdp/data/documents.h"
#include "fsdp/data/pack.h"
#include "fsdp/data/tokenizer.h"
#include "fsdp/train/log/console.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

// --- pack ----------------------------------------------------------------------------------------

struct PackArguments {
  std::vector<std::string> inputs;
  std::string output;
  bool overwrite = false;
  bool any_bytes = false;
  std::string tokenizer = kByteTokenizerName;
  std::string field;
  std::string end_of_document;
};

void run_pack(const PackArguments& given) {
  if (given.inputs.empty())
    throw UsageError("INPUT is missing; e.g. fsdp data pack books --output books.bin");
  if (given.output.empty()) throw UsageError("--output is missing; name the file to write");
  const auto start = std::chrono::steady_clock::now();
  PackSummary summary;
  {
    Progress progress("pack");
    PackOptions options;
    if (given.any_bytes) options.text.named = NamedFiles::kAnyBytes;
    options.text.field = given.field;
    options.tokenizer = open_tokenizer(given.tokenizer, given.end_of_document);
    if (given.overwrite) options.existing = PackOptions::Existing::kReplace;
    options.progress = [&](int64_t done, int64_t total) { progress.update(done, total); };
    summary = pack_tokens(given.inputs, given.output, options);
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
  const TokenHeader& header = summary.header;
  if (summary.left_out.total() > 0) log(LogLevel::kInfo, "left out: ", to_text(summary.left_out));
  for (const std::string& each : summary.findings.sentences()) log(LogLevel::kWarning, each);
  std::cout << "wrote " << given.output << ": " << counted_text(header.num_tokens, "token") << ", "
            << counted_text(header.num_documents, "document") << " from "
            << counted_text(summary.num_files, "file") << ", "
            << bytes_text(kTokenHeaderBytes + header.data_bytes()) << ", "
            << train::duration_text(passed.count()) << ", fingerprint "
            << fingerprint_text(fingerprint_of(header)) << "\n";
}

constexpr const char* kPackFooter =
    "INPUTs are text files (UTF-8), rows of JSON or parquet, directories (the files in and below "
    "them, sorted by path;\nhidden ones and those that are no text are left out) and packed files "
    "to "
    "join. A document is a file, or a row of\nJSON or parquet: its 'text', its 'prompt' and "
    "'completion' (which "
    "alone is learnt), or its chat (of which the\nassistant's turns are learnt): 'messages', "
    "'conversations', or 'instruction' and 'output'. "
    "FILE appears when it is complete, and not at all when something fails.\n"
    "Examples:\n"
    "  fsdp data pack books --output books.bin\n"
    "  fsdp data pack rows.jsonl --tokenizer Llama-3.2-1B --output rows.bin\n"
    "  fsdp data pack a.txt b.txt old.bin --output all.bin --overwrite\n"
    "docs/data.md tells more.";

// How text is read, for both commands.
template <typename Arguments>
void add_text_options(CLI::App& app, Arguments& given) {
  app.add_option("--tokenizer", given.tokenizer,
                 "Of text: a tokenizer.json, or a directory with one")
      ->type_name("PATH|bytes")
      ->capture_default_str();
  app.add_option("--field", given.field, "Rows of JSON or parquet have their text in this field")
      ->type_name("NAME");
}

CLI::App* add_data_pack(CLI::App& parent, PackArguments& given) {
  CLI::App* app =
      parent.add_subcommand("pack", "Pack text into a token file that is memory-mapped");
  app->footer(kPackFooter);
  app->allow_extras();
  app->add_option("INPUT", given.inputs, "What to pack, in this order")->type_name("");
  app->add_option("--output", given.output, "The file to write, named *.bin")->type_name("FILE");
  app->add_flag("--overwrite", given.overwrite, "Replace FILE if it is there");
  add_text_options(*app, given);
  app->add_option("--end-of-document", given.end_of_document,
                  "The token after each document; without it, what the tokenizer's files say")
      ->type_name("TOKEN");
  app->add_flag("--any-bytes", given.any_bytes, "Take named files as they are, text or not");
  return app;
}

// --- info ----------------------------------------------------------------------------------------

struct InfoArguments {
  std::vector<std::string> paths;
  std::string tokenizer = kByteTokenizerName;
  std::string field;
  bool json = false;
  bool verify = false;
};

// The text by which a person recognises the data; only bytes can be shown without a tokenizer.
std::string beginning_of(const Corpus& corpus) {
  constexpr int64_t kMaxTokens = 200;
  if (corpus.tokenizer() != kByteTokenizerName) return "";
  std::vector<int64_t> tokens(static_cast<size_t>(std::min(kMaxTokens, corpus.num_tokens())));
  corpus.read(0, tokens);
  return open_tokenizer(kByteTokenizerName)->next_text(tokens);
}

void print_corpus_json(const Corpus& corpus, const InfoArguments& given) {
  const TokenHeader& header = corpus.header();
  const LeftOut& left_out = corpus.left_out();
  Json json = {{"paths", given.paths},
               {"files", corpus.num_files()},
               {"left_out",
                {{"hidden", left_out.num_hidden},
                 {"binary", left_out.num_binary},
                 {"not_utf8", left_out.num_not_utf8},
                 {"rows", left_out.num_rows},
                 {"beside_rows", left_out.num_beside_rows},
                 {"empty", left_out.num_empty},
                 {"other", left_out.num_other}}},
               {"tokens", header.num_tokens},
               {"learnt", corpus.num_learnt()},
               {"documents", header.num_documents},
               {"tokenizer", header.tokenizer},
               {"vocabulary", header.vocabulary},
               {"end_of_document", nullptr},
               {"token_bytes", header.token_bytes},
               {"data_bytes", header.data_bytes()},
               {"fingerprint", fingerprint_text(corpus.fingerprint())},
               {"verified", given.verify},
               {"begins", beginning_of(corpus)}};
  if (header.end_of_document) json["end_of_document"] = *header.end_of_document;
  // Text may be cut inside a character, or not be UTF-8 at all.
  std::cout << json.dump(2, ' ', true, Json::error_handler_t::replace) << "\n";
}

void print_corpus_table(const Corpus& corpus, const InfoArguments& given) {
  constexpr size_t kShownChars = 60;
  const auto row = [](const char* name, const std::string& value) {
    std::cout << std::left << std::setw(13) << name << value << "\n";
  };
  const TokenHeader& header = corpus.header();
  row("data", join(given.paths, ", "));
  row("files", grouped_text(corpus.num_files()));
  if (corpus.left_out().total() > 0) row("left out", to_text(corpus.left_out()));
  row("tokens", concat(grouped_text(header.num_tokens), " of ", header.token_bytes, " bytes, ",
                       bytes_text(header.data_bytes())));
  if (corpus.has_mask())
    row("learnt", concat(grouped_text(corpus.num_learnt()), " of the tokens (loss mask)"));
  row("documents", grouped_text(header.num_documents));
  row("tokenizer", concat("'", header.tokenizer, "', vocabulary ", grouped_text(header.vocabulary),
                          ", end of document ",
                          header.end_of_document ? concat(*header.end_of_document) : "none"));
  row("fingerprint", fingerprint_text(corpus.fingerprint()));
  for (const std::string& each : corpus.findings().sentences()) row("note", each);
  if (given.verify) row("verified", "checksums and all tokens are right");
  if (const std::string text = beginning_of(corpus); !text.empty())
    row("begins", concat("\"", shown(text, kShownChars), "\""));
}

void run_info(const InfoArguments& given) {
  if (given.paths.empty()) throw UsageError("PATH is missing; e.g. fsdp data info books.bin");
  const auto corpus = Corpus::open(
      given.paths, {.tokenizer = open_tokenizer(given.tokenizer), .field = given.field});
  if (given.verify) {
    Progress progress("verify");
    corpus->verify([&](int64_t done) { progress.update(done, corpus->header().data_bytes()); });
  }
  if (given.json)
    print_corpus_json(*corpus, given);
  else
    print_corpus_table(*corpus, given);
}

constexpr const char* kInfoFooter =
    "Several PATHs are shown as the one sequence of tokens that a run would train on. Two runs "
    "with "
    "the same\nfingerprint have the same tokens.\n"
    "Examples:\n"
    "  fsdp data info books.bin --verify\n"
    "  fsdp data info README.md docs --json\n"
    "docs/data.md tells more.";

CLI::App* add_data_info(CLI::App& parent, InfoArguments& given) {
  CLI::App* app = parent.add_subcommand("info", "Show what packed files, or text, hold");
  app->footer(kInfoFooter);
  app->allow_extras();
  app->add_option("PATH", given.paths, "Packed files, text, rows and directories")->type_name("");
  add_text_options(*app, given);
  app->add_flag("--json", given.json, "Print one JSON object instead of the table");
  app->add_flag("--verify", given.verify, "Read everything: checksums, and every token");
  return app;
}

}  // namespace

Command add_data(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("data", "Pack text into token files, and show them");
  app->footer("fsdp data pack --help and fsdp data info --help explain the two.");
  app->require_subcommand(0, 1);  // its absence is handled below
  const auto pack = std::make_shared<PackArguments>();
  const auto info = std::make_shared<InfoArguments>();
  const CLI::App* const pack_app = add_data_pack(*app, *pack);
  const CLI::App* const info_app = add_data_info(*app, *info);
  return {app, [=] {
            if (pack_app->parsed()) return run_pack(*pack);
            if (info_app->parsed()) return run_info(*info);
            throw UsageError("no subcommand was given; use fsdp data pack or fsdp data info");
          }};
}

}  // namespace fsdp::cli
