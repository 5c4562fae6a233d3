// The data that --data names: text and token files as one sequence of tokens, read at any place.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace fsdp {

struct DocumentFindings;
struct LeftOut;
struct TokenHeader;
class Tokenizer;

struct CorpusOptions {
  std::shared_ptr<const Tokenizer> tokenizer = nullptr;  // of text; null: bytes
  // The text of rows (JSON lines, parquet) is in the field of this name; "": see docs/data.md.
  std::string field = {};
  // The most text that is held in memory (as tokens); more must be packed first.
  int64_t max_text_bytes = int64_t{2} << 30;
  // So much of packed files is looked over when they are opened, and a piece of each at least; 0:
  // nothing. See TokenFile::look_over().
  int64_t looked_over_bytes = int64_t{64} << 20;
  // Tokens of text are kept in this directory, and taken from it if they are there (kept_tokens.h);
  // "": held in memory. Bytes, which are tokens at once, are not kept.
  std::string kept_tokens = {};
  // Told how many bytes of text are tokenised, of how many, after every piece.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
};

// Immutable; any number of threads may read it at a time, so the ranks of a process share one.
class Corpus {
 public:
  // Text files, JSON lines, parquet files, directories, and packed token files (named *.bin, or
  // recognised by their first bytes), in the order given. All must have the same tokenizer and
  // token width. Error with the path and what to do.
  static std::shared_ptr<const Corpus> open(std::span<const std::string> paths,
                                            const CorpusOptions& options = {});

  ~Corpus();
  Corpus(const Corpus&) = delete;
  Corpus& operator=(const Corpus&) = delete;

  int64_t num_tokens() const;
  int64_t num_documents() const;
  int64_t vocabulary() const;
  const std::string& tokenizer() const;
  std::optional<int64_t> end_of_document() const;
  // The header that a token file of all the tokens would have.
  const TokenHeader& header() const;
  int64_t num_files() const;
  const LeftOut& left_out() const;
  // Rows that were read from text and that a person should look at.
  const DocumentFindings& findings() const;

  // See fingerprint_of().
  uint64_t fingerprint() const;

  // For each of the paths, in their order: the number of the token after its last one.
  std::vector<int64_t> path_ends() const;

  // Tokens that are learnt as targets: all of them, but for files with loss masks.
  int64_t num_learnt() const;
  bool has_mask() const;

  // Tokens from `first` on. An Error names the file whose token is outside the vocabulary.
  // `learnt`, if it is not empty, gets 1 for each token that is learnt as a target, and 0 for each
  // other.
  void read(int64_t first, std::span<int64_t> into, std::span<uint8_t> learnt = {}) const;

  // The bytes of all packed files.
  int64_t packed_bytes() const;

  // Reads all packed files, and fails where a checksum or a token is wrong. `progress` is told how
  // many of all bytes are done, now and then.
  void verify(const std::function<void(int64_t)>& progress = {}) const;

  // UsageError for data of which nothing is learnt.
  void check_learnt() const;

  // UsageError for a model that has fewer tokens than the data.
  void check_model_vocabulary(int64_t model_vocabulary) const;

  // "12 files, 1,234,567 tokens of tokenizer 'bytes' (vocabulary 257)", and what was left out
  std::string summary() const;

 private:
  friend class CorpusBuilder;
  struct Content;

  explicit Corpus(std::unique_ptr<const Content> content);

  const std::unique_ptr<const Content> content_;
};

// Whether a path is taken for a packed token file.
bool is_token_file(const std::string& path);

// --- verified beside the training ----------------------------------------------------------------

// Verifies packed files in a thread, beside the training that reads them.

// Any number of threads may ask at a time.
class CorpusCheck {
 public:
  // Files of at most `waited_bytes` in all are verified when this returns, which throws as wait()
  // does.
  explicit CorpusCheck(std::vector<std::shared_ptr<const Corpus>> corpora,
                       int64_t waited_bytes = int64_t{64} << 20);
  // Does not wait for the files.
  ~CorpusCheck();
  CorpusCheck(const CorpusCheck&) = delete;
  CorpusCheck& operator=(const CorpusCheck&) = delete;

  // Whether damage is found already.
  bool has_failed() const { return has_failed_; }

  // Waits until everything is verified. Throws the Error of Corpus::verify().
  void wait() const { verified_.get(); }

 private:
  void verify(const std::vector<std::shared_ptr<const Corpus>>& corpora);

  std::atomic<bool> is_stopped_ = false;
  std::atomic<bool> has_failed_ = false;
  std::promise<void> outcome_;
  const std::shared_future<void> verified_ = outcome_.get_future().share();
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fsdp
