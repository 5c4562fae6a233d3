#include "fsdp/data/token_windows.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"

namespace fsdp {
namespace {

constexpr int64_t kMaxSequence = int64_t{1} << 31;

void check_sequence(int64_t sequence) {
  if (sequence < 1 || sequence > kMaxSequence)
    throw UsageError(concat("sequence is ", sequence, "; it must be from 1 to ", kMaxSequence));
}

[[noreturn]] void refuse_short(const Corpus& corpus, int64_t sequence, int64_t num_windows,
                               int64_t needed_tokens) {
  throw UsageError(concat("the data has ", counted_text(corpus.num_tokens(), "token"), " where ",
                          counted_text(num_windows, "window"), " of sequence ", sequence, " need ",
                          grouped_text(needed_tokens), "; give more data or a shorter sequence"));
}

}  // namespace

TokenWindows::TokenWindows(std::shared_ptr<const Corpus> corpus, int64_t sequence,
                           int64_t first_token, int64_t num_tokens)
    : corpus_(std::move(corpus)),
      sequence_(sequence),
      first_token_(first_token),
      num_windows_(std::max<int64_t>(0, (num_tokens - 1) / sequence)) {
  FSDP_ASSERT(first_token >= 0 && num_tokens >= 0 &&
                  checked_add(first_token, num_tokens) <= corpus_->num_tokens(),
              "tokens ", first_token, " + ", num_tokens, " of ", corpus_->num_tokens());
}

void TokenWindows::read(int64_t window, std::span<int64_t> into) const {
  FSDP_ASSERT(window >= 0 && window < num_windows_, window, " of ", num_windows_);
  FSDP_ASSERT(static_cast<int64_t>(into.size()) == sequence_ + 1, into.size());
  corpus_->read(first_token(window), into);
}

DataSplit split_corpus(const std::shared_ptr<const Corpus>& corpus, const SplitOptions& options) {
  const int64_t sequence = options.sequence;
  check_sequence(sequence);
  const double fraction = options.validation_fraction;
  if (!(fraction >= 0 && fraction < 1))
    throw UsageError(concat("validation_fraction is ", fraction,
                            "; it must be at least 0 and below 1, e.g. 0.01"));
  const int64_t num_tokens = corpus->num_tokens();
  const TokenWindows all(corpus, sequence, 0, num_tokens);
  if (fraction == 0) {
    if (all.num_windows() < 1) refuse_short(*corpus, sequence, 1, sequence + 1);
    return {all, TokenWindows(corpus, sequence, num_tokens, 0)};
  }
  const auto share = static_cast<int64_t>(fraction * static_cast<double>(all.num_windows()));
  const int64_t validation_tokens = std::max<int64_t>(share, 1) * sequence + 1;
  const int64_t training_tokens = num_tokens - validation_tokens;
  if (training_tokens < sequence + 1)
    refuse_short(*corpus, sequence, 2, validation_tokens + sequence + 1);
  return {TokenWindows(corpus, sequence, 0, training_tokens),
          TokenWindows(corpus, sequence, training_tokens, validation_tokens)};
}

TokenWindows all_windows(const std::shared_ptr<const Corpus>& corpus, int64_t sequence) {
  check_sequence(sequence);
  TokenWindows all(corpus, sequence, 0, corpus->num_tokens());
  if (all.num_windows() < 1) refuse_short(*corpus, sequence, 1, sequence + 1);
  return all;
}

}  // namespace fsdp
