#include "fsdp/data/pack.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/data/corpus.h"
#include "fsdp/data/documents.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;

// Opened and counted before anything is written.
struct Source {
  std::optional<TokenFile> tokens;  // or
  TextFile text = {};
};

class Packing {
 public:
  explicit Packing(const PackOptions& options)
      : options_(options),
        tokenizer_(options.tokenizer ? options.tokenizer : open_tokenizer(kByteTokenizerName)) {}

  void find(std::span<const std::string> paths) {
    DataSources sources = find_sources(paths, *tokenizer_, options_.text);
    for (size_t i = 0; i < paths.size(); ++i) {
      if (sources.texts[i].files.empty())
        add_token_file(paths[i]);
      else
        add_text(paths[i], sources.text_kind, std::move(sources.texts[i]));
    }
    summary_.num_files = static_cast<int64_t>(sources_.size());
  }

  PackSummary write(const std::string& output) {
    TokenFileWriter writer(output, *kind_);
    for (const Source& source : sources_) {
      if (source.tokens)
        copy_tokens(*source.tokens, writer);
      else
        encode_text(source.text, writer);
    }
    summary_.header = writer.commit();
    return std::move(summary_);
  }

 private:
  void add_token_file(const std::string& path) {
    TokenFile file(path);
    check_kind(file.header(), path);
    summary_.source_bytes += file.header().data_bytes();
    sources_.push_back({std::move(file)});
  }

  void add_text(const std::string& path, const TokenHeader& kind, TextFiles files) {
    check_kind(kind, path);
    summary_.source_bytes += files.bytes;
    for (TextFile& each : files.files) sources_.push_back({std::nullopt, std::move(each)});
    summary_.left_out += files.left_out;
  }

  void check_kind(const TokenHeader& header, const std::string& path) {
    if (!kind_) {
      kind_ = header;
      first_path_ = path;
      return;
    }
    check_same_kind(*kind_, first_path_, header, path);
    if (header.has_mask()) kind_->num_learnt = 0;  // one mask makes the file one with a mask
  }

  void encode_text(const TextFile& file, TokenFileWriter& writer) {
    summary_.findings.add(encode_documents(
        file, options_.text.field, *tokenizer_,
        {.tokens = [&](auto tokens, Learnt learnt) { writer.write(tokens, learnt); },
         .progress =
             [&](int64_t num_documents, int64_t bytes) {
               writer.count_documents(num_documents);
               advance(bytes);
             }}));
  }

  // Checks the source first: a damaged file must not become a file with a good checksum.
  void copy_tokens(const TokenFile& file, TokenFileWriter& writer) {
    const TokenHeader& header = file.header();
    std::vector<int64_t> tokens;
    uint32_t checksum = 0;
    for (int64_t first = 0; first < header.num_tokens;) {
      const int64_t count = std::min(kPieceBytes / header.token_bytes, header.num_tokens - first);
      tokens.resize(static_cast<size_t>(count));
      file.read(first, tokens);
      const auto stored = file.data().subspan(static_cast<size_t>(first * header.token_bytes),
                                              static_cast<size_t>(count * header.token_bytes));
      checksum = crc32c(stored, checksum);
      writer.write_stored(stored);
      advance(count * header.token_bytes);
      first += count;
    }
    FSDP_CHECK(checksum == header.data_crc32c, file.path(),
               ": its tokens are damaged (the checksum differs); use another copy");
    writer.count_documents(header.num_documents);
  }

  void advance(int64_t bytes) {
    done_bytes_ += bytes;
    if (options_.progress) options_.progress(done_bytes_, summary_.source_bytes);
  }

  const PackOptions& options_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  std::vector<Source> sources_;
  std::optional<TokenHeader> kind_;  // of the first source
  std::string first_path_;
  PackSummary summary_;
  int64_t done_bytes_ = 0;
};

}  // namespace

PackSummary pack_tokens(std::span<const std::string> paths, const std::string& output,
                        const PackOptions& options) {
  if (paths.empty())
    throw UsageError("nothing to pack is named; give text files, directories or token files");
  FSDP_CHECK(!is_directory(output), output, ": is a directory; name a file, e.g. ", output,
             output.ends_with('/') ? "" : "/", "tokens.bin");
  FSDP_CHECK(options.existing == PackOptions::Existing::kReplace || !path_exists(output), output,
             ": is there already; name another file, or replace it with --overwrite");
  Packing packing(options);
  packing.find(paths);
  return packing.write(output);
}

}  // namespace fsdp
