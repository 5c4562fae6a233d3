// A corpus cut into windows of sequence + 1 tokens, and the part of them that is kept for
// validation.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "fsdp/data/corpus.h"

namespace fsdp {

// Neighbouring windows share one token: the last target of one is the first input of the next, so
// that every token but the first is predicted once. What is too short for a window in the end is
// left out. Windows go over ends of documents and files.
class TokenWindows {
 public:
  // All windows in the tokens from `first` to `first + num_tokens`.
  TokenWindows(std::shared_ptr<const Corpus> corpus, int64_t sequence, int64_t first_token,
               int64_t num_tokens);

  const Corpus& corpus() const { return *corpus_; }
  int64_t sequence() const { return sequence_; }
  int64_t num_windows() const { return num_windows_; }

  // Its first token's number in the corpus.
  int64_t first_token(int64_t window) const { return first_token_ + window * sequence_; }

  // Its sequence + 1 tokens.
  void read(int64_t window, std::span<int64_t> into) const;

 private:
  std::shared_ptr<const Corpus> corpus_;
  int64_t sequence_;
  int64_t first_token_;
  int64_t num_windows_;
};

struct SplitOptions {
  int64_t sequence = 256;  // tokens that a window predicts
  double validation_fraction =
      0.01;  // of the windows, at the end of the corpus, one at least; 0: none
};

// No token is in both.
struct DataSplit {
  TokenWindows training;
  TokenWindows validation;
};

// UsageError where the corpus is too short for a window of each kind.
DataSplit split_corpus(const std::shared_ptr<const Corpus>& corpus, const SplitOptions& options);

// The whole corpus: for validation data of its own. UsageError where it has no window.
TokenWindows all_windows(const std::shared_ptr<const Corpus>& corpus, int64_t sequence);

}  // namespace fsdp
