#include "fsdp/data/token_windows.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/data/token_header.h"

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

constexpr const char* kFormat = "fsdp-data-position";
constexpr int64_t kPositionVersion = 1;

// JSON numbers of other programs have 53 bits.
uint64_t hexadecimal(const JsonFields& fields, const char* field) {
  const std::string text = fields.text(field);
  uint64_t value = 0;
  const char* const end = text.data() + text.size();
  if (text.size() == 18 && text.starts_with("0x")) {
    const auto [stop, error] = std::from_chars(text.data() + 2, end, value, 16);
    if (error == std::errc{} && stop == end && fingerprint_text(value) == text) return value;
  }
  fields.refuse(field, "it must be 0x and 16 hexadecimal digits");
}

int64_t at_least(const JsonFields& fields, const char* field, int64_t minimum) {
  const int64_t value = fields.integer(field);
  if (value < minimum) fields.refuse(field, concat("it must be at least ", minimum));
  return value;
}

[[noreturn]] void refuse_other(const std::string& what, const std::string& before,
                               const std::string& now, const std::string& fix) {
  throw UsageError(concat(what, " was ", before, " when the run was saved and is ", now,
                          " now, so its place in the data cannot be found; ", fix,
                          ", or begin the data anew (--restart-data)"));
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

void TokenWindows::read(int64_t window, std::span<int64_t> into, std::span<uint8_t> learnt) const {
  FSDP_ASSERT(window >= 0 && window < num_windows_, window, " of ", num_windows_);
  FSDP_ASSERT(static_cast<int64_t>(into.size()) == sequence_ + 1, into.size());
  corpus_->read(first_token(window), into, learnt);
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

std::string to_json(const DataPosition& position) {
  const nlohmann::ordered_json json = {{"format", kFormat},
                                       {"version", kPositionVersion},
                                       {"windows_used", position.windows_used},
                                       {"seed", fingerprint_text(position.seed)},
                                       {"sequence", position.sequence},
                                       {"num_windows", position.num_windows},
                                       {"fingerprint", fingerprint_text(position.fingerprint)}};
  return json.dump();
}

DataPosition parse_data_position(const std::string& text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  const JsonFields fields(json, source, "");
  if (fields.text("format") != kFormat) fields.refuse("format", concat("it must be ", kFormat));
  if (at_least(fields, "version", 1) != kPositionVersion)
    fields.refuse("version", concat("this program reads ", kPositionVersion, "; use a newer fsdp"));
  fields.allow_only(
      {"format", "version", "windows_used", "seed", "sequence", "num_windows", "fingerprint"});
  return {.windows_used = at_least(fields, "windows_used", 0),
          .seed = hexadecimal(fields, "seed"),
          .sequence = at_least(fields, "sequence", 1),
          .num_windows = at_least(fields, "num_windows", 1),
          .fingerprint = hexadecimal(fields, "fingerprint")};
}

DataPosition first_position(const TokenWindows& windows, uint64_t seed) {
  return {.windows_used = 0,
          .seed = seed,
          .sequence = windows.sequence(),
          .num_windows = windows.num_windows(),
          .fingerprint = windows.corpus().fingerprint()};
}

void check_same_order(const DataPosition& position, const TokenWindows& windows, uint64_t seed) {
  const DataPosition here = first_position(windows, seed);
  if (position.fingerprint != here.fingerprint)
    refuse_other("the data's fingerprint", fingerprint_text(position.fingerprint),
                 fingerprint_text(here.fingerprint), "give the same files in the same order");
  if (position.sequence != here.sequence)
    refuse_other("sequence", concat(position.sequence), concat(here.sequence), "use the same");
  if (position.num_windows != here.num_windows)
    refuse_other("the number of training windows", concat(position.num_windows),
                 concat(here.num_windows), "keep the same share for validation");
  if (position.seed != here.seed)
    refuse_other("the data's seed", concat(position.seed), concat(here.seed), "use the same");
}

}  // namespace fsdp
