#include "fsdp/data/token_windows.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/data/source_mix.h"
#include "fsdp/data/token_header.h"

namespace fsdp {

namespace {

constexpr int64_t kMaxSequence = int64_t{1} << 31;

void check_sequence(int64_t sequence) {
  if (sequence < 1 || sequence > kMaxSequence)
    throw UsageError(concat("sequence is ", sequence, "; it must be from 1 to ", kMaxSequence));
}

[[noreturn]] void refuse_short(int64_t num_tokens, int64_t sequence, int64_t num_windows,
                               int64_t needed_tokens) {
  throw UsageError(concat("the data has ", counted_text(num_tokens, "token"), " where ",
                          counted_text(num_windows, "window"), " of sequence ", sequence, " need ",
                          grouped_text(needed_tokens), "; give more data or a shorter sequence"));
}

constexpr const char* kFormat = "fsdp-data-position";
constexpr int64_t kPositionVersion = 1;
constexpr int64_t kWeightedVersion = 2;  // with sources

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

// "7000 of 412 windows, 3000 of 99 windows": shares of 10,000, and what they are drawn from.
std::string mix_text(const std::vector<WeightedSource>& sources) {
  std::vector<std::string> texts;
  for (const WeightedSource& source : sources)
    texts.push_back(concat(source.share, " of ", counted_text(source.num_windows, "window")));
  return texts.empty() ? "without weights" : join(texts, ", ");
}

}  // namespace

TokenWindows::TokenWindows(std::shared_ptr<const Corpus> corpus, int64_t sequence,
                           const std::vector<Range>& ranges)
    : corpus_(std::move(corpus)), sequence_(sequence) {
  for (const Range& range : ranges) {
    FSDP_ASSERT(range.first_token >= 0 && range.num_tokens >= 0 &&
                    checked_add(range.first_token, range.num_tokens) <= corpus_->num_tokens(),
                "tokens ", range.first_token, " + ", range.num_tokens, " of ",
                corpus_->num_tokens());
    first_tokens_.push_back(range.first_token);
    range_begins_.push_back(num_windows_);
    num_windows_ += std::max<int64_t>(0, (range.num_tokens - 1) / sequence);
  }
  range_begins_.push_back(num_windows_);
}

int64_t TokenWindows::first_token(int64_t window) const {
  FSDP_ASSERT(window >= 0 && window < num_windows_, window, " of ", num_windows_);
  // The last range that begins at or before it; ranges without windows begin with the next one.
  const auto next = std::upper_bound(range_begins_.begin(), range_begins_.end(), window);
  const auto range = static_cast<size_t>(next - range_begins_.begin()) - 1;
  return first_tokens_[range] + (window - range_begins_[range]) * sequence_;
}

void TokenWindows::read(int64_t window, std::span<int64_t> into, std::span<uint8_t> learnt) const {
  FSDP_ASSERT(static_cast<int64_t>(into.size()) == sequence_ + 1, into.size());
  corpus_->read(first_token(window), into, learnt);
}

namespace {

using Range = TokenWindows::Range;

// The tokens of one range for training, and those for validation.
std::pair<Range, Range> split_range(const Range& range, const SplitOptions& options) {
  const int64_t sequence = options.sequence;
  const double fraction = options.validation_fraction;
  if (fraction == 0) {
    if (range.num_tokens < sequence + 1) refuse_short(range.num_tokens, sequence, 1, sequence + 1);
    return {range, {range.first_token + range.num_tokens, 0}};
  }
  const auto num_windows = static_cast<double>((range.num_tokens - 1) / sequence);
  const auto share = static_cast<int64_t>(fraction * num_windows);
  const int64_t validation_tokens = std::max<int64_t>(share, 1) * sequence + 1;
  const int64_t training_tokens = range.num_tokens - validation_tokens;
  if (training_tokens < sequence + 1)
    refuse_short(range.num_tokens, sequence, 2, validation_tokens + sequence + 1);
  return {{range.first_token, training_tokens},
          {range.first_token + training_tokens, validation_tokens}};
}

}  // namespace

DataSplit split_corpus(const std::shared_ptr<const Corpus>& corpus, const SplitOptions& options) {
  const int64_t sequence = options.sequence;
  check_sequence(sequence);
  const double fraction = options.validation_fraction;
  if (!(fraction >= 0 && fraction < 1))
    throw UsageError(concat("validation_fraction is ", fraction,
                            "; it must be at least 0 and below 1, e.g. 0.01"));
  std::vector<Range> training;
  std::vector<Range> validation;
  int64_t begin = 0;
  const std::vector<int64_t> whole = {corpus->num_tokens()};
  for (const int64_t end : options.by_path ? corpus->path_ends() : whole) {
    const auto [trained, kept] = split_range({begin, end - begin}, options);
    training.push_back(trained);
    validation.push_back(kept);
    begin = end;
  }
  return {TokenWindows(corpus, sequence, training), TokenWindows(corpus, sequence, validation)};
}

TokenWindows all_windows(const std::shared_ptr<const Corpus>& corpus, int64_t sequence) {
  check_sequence(sequence);
  TokenWindows all(corpus, sequence, {{0, corpus->num_tokens()}});
  if (all.num_windows() < 1) refuse_short(corpus->num_tokens(), sequence, 1, sequence + 1);
  return all;
}

std::string to_json(const DataPosition& position) {
  const bool is_weighted = !position.sources.empty();
  nlohmann::ordered_json json = {{"format", kFormat},
                                 {"version", is_weighted ? kWeightedVersion : kPositionVersion},
                                 {"windows_used", position.windows_used},
                                 {"seed", fingerprint_text(position.seed)},
                                 {"sequence", position.sequence},
                                 {"num_windows", position.num_windows},
                                 {"fingerprint", fingerprint_text(position.fingerprint)}};
  for (const WeightedSource& source : position.sources)
    json["sources"].push_back({{"num_windows", source.num_windows}, {"share", source.share}});
  return json.dump();
}

DataPosition parse_data_position(const std::string& text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  const JsonFields fields(json, source, "");
  if (fields.text("format") != kFormat) fields.refuse("format", concat("it must be ", kFormat));
  const int64_t version = at_least(fields, "version", 1);
  if (version > kWeightedVersion)
    fields.refuse("version", concat("this program reads ", kPositionVersion, " and ",
                                    kWeightedVersion, "; use a newer fsdp"));
  std::vector<WeightedSource> sources;
  if (version == kWeightedVersion) {
    fields.allow_only({"format", "version", "windows_used", "seed", "sequence", "num_windows",
                       "fingerprint", "sources"});
    for (size_t i = 0; i < fields.array("sources").size(); ++i) {
      const JsonFields weighted = fields.element("sources", i);
      weighted.allow_only({"num_windows", "share"});
      sources.push_back({at_least(weighted, "num_windows", 1), at_least(weighted, "share", 1)});
    }
  } else {
    fields.allow_only(
        {"format", "version", "windows_used", "seed", "sequence", "num_windows", "fingerprint"});
  }
  return {.windows_used = at_least(fields, "windows_used", 0),
          .seed = hexadecimal(fields, "seed"),
          .sequence = at_least(fields, "sequence", 1),
          .num_windows = at_least(fields, "num_windows", 1),
          .fingerprint = hexadecimal(fields, "fingerprint"),
          .sources = std::move(sources)};
}

DataPosition first_position(const TokenWindows& windows, uint64_t seed,
                            std::span<const double> weights) {
  DataPosition position{.windows_used = 0,
                        .seed = seed,
                        .sequence = windows.sequence(),
                        .num_windows = windows.num_windows(),
                        .fingerprint = windows.corpus().fingerprint()};
  if (weights.empty()) return position;
  const std::vector<int64_t>& begins = windows.range_begins();
  FSDP_ASSERT(begins.size() == weights.size() + 1, weights.size(), " weights");
  const std::vector<int64_t> shares = source_shares(weights);
  for (size_t i = 0; i < shares.size(); ++i)
    position.sources.push_back({begins[i + 1] - begins[i], shares[i]});
  return position;
}

void check_same_order(const DataPosition& position, const TokenWindows& windows, uint64_t seed,
                      std::span<const double> weights) {
  const DataPosition here = first_position(windows, seed, weights);
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
  if (position.sources != here.sources)
    refuse_other("the mix of the data", mix_text(position.sources), mix_text(here.sources),
                 "give the same --data with the same --data-weights");
}

}  // namespace fsdp
