#include "fsdp/data/corpus.h"

#include <algorithm>
#include <array>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/start_thread.h"
#include "fsdp/data/documents.h"
#include "fsdp/data/kept_tokens.h"
#include "fsdp/data/text_files.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp {

struct Corpus::Content {
  struct Part {
    int64_t begin = 0;  // the number of its first token
    int64_t end = 0;
    std::optional<TokenFile> file = {};  // or
    std::string text = {};               // tokens, as a file stores them
    bool has_mask = false;               // of the text
  };

  std::vector<Part> parts;
  TokenHeader info;
  int64_t num_files = 0;
  LeftOut left_out;
  DocumentFindings findings;
};

// Adds the paths one by one.
class CorpusBuilder {
 public:
  CorpusBuilder(const CorpusOptions& options, size_t num_paths)
      : options_(options),
        tokenizer_(options.tokenizer ? options.tokenizer : open_tokenizer(kByteTokenizerName)),
        looked_over_bytes_(options.looked_over_bytes / static_cast<int64_t>(num_paths)) {}

  void add(std::span<const std::string> paths) {
    DataSources sources = find_sources(paths, *tokenizer_, {.field = options_.field});
    for (const TextFiles& each : sources.texts) total_bytes_ += each.bytes;
    for (size_t i = 0; i < paths.size(); ++i) {
      if (sources.texts[i].files.empty())
        add_token_file(paths[i]);
      else
        add_text(paths[i], sources.text_kind, sources.texts[i]);
    }
  }

  std::shared_ptr<const Corpus> build() {
    return std::shared_ptr<const Corpus>(new Corpus(std::move(content_)));
  }

 private:
  void add_token_file(const std::string& path) {
    TokenFile file(path);
    file.look_over(looked_over_bytes_);
    const TokenHeader header = file.header();
    ++content_->num_files;
    append(header, path, {.file = std::move(file)});
  }

  void add_text(const std::string& path, TokenHeader header, const TextFiles& files) {
    text_bytes_ += files.bytes;
    check_text_bytes(path, text_bytes_);
    content_->left_out += files.left_out;
    content_->num_files += static_cast<int64_t>(files.files.size());
    const bool is_of_bytes = tokenizer_->kind().tokenizer == kByteTokenizerName;
    if (!options_.kept_tokens.empty() && !is_of_bytes) return add_kept(path, header, files);
    std::string tokens;
    if (is_of_bytes) tokens.reserve(2 * (static_cast<size_t>(files.bytes) + files.files.size()));
    const auto take = [&](std::span<const int64_t> more, Learnt learnt) {
      append_stored(more, learnt, header.token_bytes, tokens);
      if (header.has_mask() && learnt == Learnt::kYes)
        *header.num_learnt += static_cast<int64_t>(more.size());
    };
    content_->findings.add(encode(files, take, [&](int64_t num_documents) {
      header.num_documents += num_documents;
      // Compressed rows have more text than their file has bytes.
      check_text_bytes(path, static_cast<int64_t>(tokens.size() / 4));
    }));
    header.num_tokens = static_cast<int64_t>(tokens.size()) / header.token_bytes;
    header.data_crc32c = crc32c(std::as_bytes(std::span(tokens)));
    append(header, path, {.text = std::move(tokens), .has_mask = header.has_mask()});
  }

  // Reads the tokens from a file, which is written if it is not there.
  void add_kept(const std::string& path, const TokenHeader& kind, const TextFiles& files) {
    const KeptTokens kept(options_.kept_tokens, path, files, *tokenizer_, options_.field, kind);
    std::optional<KeptTokens::Found> found = kept.find();
    if (found) {
      done_bytes_ += files.bytes;
    } else {
      make_directories(options_.kept_tokens);
      TokenFileWriter writer(kept.path(), kind);
      DocumentFindings findings = encode(
          files, [&](auto tokens, Learnt learnt) { writer.write(tokens, learnt); },
          [&](int64_t num_documents) { writer.count_documents(num_documents); });
      writer.commit();
      kept.complete(findings);
      found.emplace(TokenFile(kept.path()), std::move(findings));
    }
    content_->findings.add(std::move(found->findings));
    const TokenHeader header = found->tokens.header();
    append(header, path, {.file = std::move(found->tokens)});
  }

  DocumentFindings encode(const TextFiles& files,
                          const std::function<void(std::span<const int64_t>, Learnt)>& take,
                          const std::function<void(int64_t)>& count_documents) {
    DocumentFindings findings;
    const auto advance = [&](int64_t num_documents, int64_t bytes) {
      count_documents(num_documents);
      done_bytes_ += bytes;
      if (options_.progress) options_.progress(done_bytes_, total_bytes_);
    };
    for (const TextFile& file : files.files)
      findings.add(encode_documents(file, options_.field, *tokenizer_,
                                    {.tokens = take, .progress = advance}));
    return findings;
  }

  void check_text_bytes(const std::string& path, int64_t bytes) const {
    FSDP_CHECK(bytes <= options_.max_text_bytes, path, ": with it there are ",
               bytes_text(static_cast<double>(bytes)), " of text, more than the ",
               bytes_text(static_cast<double>(options_.max_text_bytes)),
               " that are held in memory; pack it with fsdp data pack and name the .bin file");
  }

  void append(const TokenHeader& header, const std::string& path, Corpus::Content::Part part) {
    TokenHeader& all = content_->info;
    if (content_->parts.empty()) {
      all = header;
      first_path_ = path;
    } else {
      check_same_kind(all, first_path_, header, path);
      if (all.has_mask() || header.has_mask())
        all.num_learnt =
            all.num_learnt.value_or(all.num_tokens) + header.num_learnt.value_or(header.num_tokens);
      all.num_tokens = checked_add(all.num_tokens, header.num_tokens);
      all.num_documents += header.num_documents;
      all.data_crc32c = crc32c_of_joined(all.data_crc32c, header.data_crc32c, header.data_bytes());
    }
    part.end = all.num_tokens;
    part.begin = part.end - header.num_tokens;
    content_->parts.push_back(std::move(part));
  }

  const CorpusOptions& options_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  int64_t looked_over_bytes_;  // of a file
  std::unique_ptr<Corpus::Content> content_ = std::make_unique<Corpus::Content>();
  int64_t text_bytes_ = 0;
  int64_t done_bytes_ = 0;  // of all text
  int64_t total_bytes_ = 0;
  std::string first_path_;
};

Corpus::Corpus(std::unique_ptr<const Content> content) : content_(std::move(content)) {}

Corpus::~Corpus() = default;

int64_t Corpus::num_tokens() const { return content_->info.num_tokens; }
int64_t Corpus::num_documents() const { return content_->info.num_documents; }
int64_t Corpus::vocabulary() const { return content_->info.vocabulary; }
const std::string& Corpus::tokenizer() const { return content_->info.tokenizer; }
std::optional<int64_t> Corpus::end_of_document() const { return content_->info.end_of_document; }
int64_t Corpus::num_learnt() const { return content_->info.num_learnt.value_or(num_tokens()); }
bool Corpus::has_mask() const { return content_->info.has_mask(); }
const TokenHeader& Corpus::header() const { return content_->info; }
int64_t Corpus::num_files() const { return content_->num_files; }
const LeftOut& Corpus::left_out() const { return content_->left_out; }
const DocumentFindings& Corpus::findings() const { return content_->findings; }
uint64_t Corpus::fingerprint() const { return fingerprint_of(content_->info); }

std::vector<int64_t> Corpus::path_ends() const {
  std::vector<int64_t> ends;
  for (const Content::Part& part : content_->parts) ends.push_back(part.end);
  return ends;
}

std::shared_ptr<const Corpus> Corpus::open(std::span<const std::string> paths,
                                           const CorpusOptions& options) {
  if (paths.empty())
    throw UsageError("no data is named; give text files, directories or packed token files");
  CorpusBuilder builder(options, paths.size());
  builder.add(paths);
  return builder.build();
}

void Corpus::read(int64_t first, std::span<int64_t> into, std::span<uint8_t> learnt) const {
  FSDP_ASSERT(first >= 0 && first + static_cast<int64_t>(into.size()) <= num_tokens(), "tokens ",
              first, " to ", first + static_cast<int64_t>(into.size()), " of ", num_tokens());
  auto part =
      std::upper_bound(content_->parts.begin(), content_->parts.end(), first,
                       [](int64_t token, const Content::Part& each) { return token < each.end; });
  while (!into.empty()) {
    const auto count =
        static_cast<size_t>(std::min(static_cast<int64_t>(into.size()), part->end - first));
    const std::span<uint8_t> learnt_here = learnt.first(std::min(count, learnt.size()));
    if (part->file) {
      part->file->read(first - part->begin, into.first(count), learnt_here);
    } else {
      const int64_t width = content_->info.token_bytes;
      widen_tokens(std::as_bytes(std::span(part->text)), width, first - part->begin,
                   into.first(count));
      if (part->has_mask)
        take_mask(into.first(count), width, learnt_here);
      else
        std::fill(learnt_here.begin(), learnt_here.end(), uint8_t{1});
    }
    first += static_cast<int64_t>(count);
    into = into.subspan(count);
    learnt = learnt.subspan(learnt_here.size());
    ++part;
  }
}

int64_t Corpus::packed_bytes() const {
  int64_t bytes = 0;
  for (const Content::Part& part : content_->parts) bytes += part.file ? part.file->bytes() : 0;
  return bytes;
}

void Corpus::verify(const std::function<void(int64_t)>& progress) const {
  for (const Content::Part& part : content_->parts)
    if (part.file)
      part.file->verify([&](int64_t bytes) {
        if (progress) progress(part.begin * content_->info.token_bytes + bytes);
      });
}

void Corpus::check_learnt() const {
  if (!has_mask() || num_learnt() > 0) return;
  std::vector<std::string> why = findings().sentences();
  throw UsageError(concat("the data has ", counted_text(num_documents(), "row"),
                          " and not one token to learn (",
                          why.empty() ? "its loss mask leaves out all" : join(why, "; "),
                          "); give rows with answers (docs/data.md lists the forms of rows)"));
}

void Corpus::check_model_vocabulary(int64_t model_vocabulary) const {
  if (vocabulary() <= model_vocabulary) return;
  throw UsageError(concat("the data's vocabulary is ", vocabulary(), " (tokenizer '", tokenizer(),
                          "') and the model's ", model_vocabulary,
                          "; use data of the model's tokenizer, or a model with a vocabulary of ",
                          vocabulary(), " or more (fsdp train --vocabulary)"));
}

std::string Corpus::summary() const {
  return concat(counted_text(num_files(), "file"), ", ", counted_text(num_tokens(), "token"),
                has_mask() ? concat(", ", grouped_text(num_learnt()), " of them learnt,") : "",
                " of tokenizer '", tokenizer(), "' (vocabulary ", vocabulary(), ")",
                left_out().total() == 0 ? "" : "; left out: ", to_text(left_out()));
}

bool is_token_file(const std::string& path) {
  if (is_directory(path)) return false;
  if (path.ends_with(".bin")) return true;
  if (!is_regular_file(path)) return false;  // find_text_files() says so; a pipe would not end
  const FileReader reader(path);
  std::array<std::byte, 8> buffer;
  const auto first = std::span(buffer).first(
      static_cast<size_t>(std::min(reader.bytes(), static_cast<int64_t>(buffer.size()))));
  reader.read(0, first);
  return begins_like_token_file(first);
}

// --- verified beside the training ----------------------------------------------------------------

CorpusCheck::CorpusCheck(std::vector<std::shared_ptr<const Corpus>> corpora, int64_t waited_bytes) {
  int64_t bytes = 0;
  for (const auto& corpus : corpora) bytes += corpus->packed_bytes();
  if (bytes <= waited_bytes) {
    verify(corpora);
    wait();
    return;
  }
  thread_ =
      start_thread("verifying the data", [this, corpora = std::move(corpora)] { verify(corpora); });
}

CorpusCheck::~CorpusCheck() {
  is_stopped_ = true;
  if (thread_.joinable()) thread_.join();
}

void CorpusCheck::verify(const std::vector<std::shared_ptr<const Corpus>>& corpora) {
  try {
    for (const auto& corpus : corpora)
      corpus->verify([this](int64_t) {
        if (is_stopped_) throw Error("verifying the data was stopped");
      });
    outcome_.set_value();
  } catch (...) {
    has_failed_ = true;
    outcome_.set_exception(std::current_exception());
  }
}

}  // namespace fsdp
