#include "fsdp/data/token_windows.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/data/packed_documents.h"
#include "fsdp/data/token_file.h"

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

// "7000 of 412 windows, 3000 of 99 windows": shares of 10,000, and what they are drawn from.
std::string mix_text(const std::vector<WeightedSource>& sources) {
  std::vector<std::string> texts;
  for (const WeightedSource& source : sources)
    texts.push_back(concat(source.share, " of ", counted_text(source.num_windows, "window")));
  return texts.empty() ? "without weights" : join(texts, ", ");
}

}  // namespace

TokenWindows::TokenWindows(std::shared_ptr<const Corpus> corpus, int64_t sequence,
                           const std::vector<Range>& ranges, WindowContent content)
    : corpus_(std::move(corpus)), sequence_(sequence) {
  const bool is_packed = content == WindowContent::kDocuments;
  PackedDocuments packed(sequence);
  for (const Range& range : ranges) {
    FSDP_ASSERT(range.first_token >= 0 && range.num_tokens >= 0 &&
                    checked_add(range.first_token, range.num_tokens) <= corpus_->num_tokens(),
                "tokens ", range.first_token, " + ", range.num_tokens, " of ",
                corpus_->num_tokens());
    first_tokens_.push_back(range.first_token);
    range_begins_.push_back(num_windows_);
    if (is_packed) packed.add(documents_in(*corpus_, range));
    num_windows_ = is_packed
                       ? packed.num_windows()
                       : num_windows_ + std::max<int64_t>(0, (range.num_tokens - 1) / sequence);
  }
  range_begins_.push_back(num_windows_);
  if (is_packed) packed_ = std::make_shared<const PackedDocuments>(std::move(packed));
}

int64_t TokenWindows::first_token(int64_t window) const {
  FSDP_ASSERT(window >= 0 && window < num_windows_, window, " of ", num_windows_);
  if (packed_) return packed_->window(window).front().first_token;
  // The last range that begins at or before it; ranges without windows begin with the next one.
  const auto next = std::upper_bound(range_begins_.begin(), range_begins_.end(), window);
  const auto range = static_cast<size_t>(next - range_begins_.begin()) - 1;
  return first_tokens_[range] + (window - range_begins_[range]) * sequence_;
}

void TokenWindows::read(int64_t window, std::span<int64_t> into, std::span<uint8_t> learnt) const {
  FSDP_ASSERT(static_cast<int64_t>(into.size()) == sequence_ + 1, into.size());
  if (packed_) {
    // Another token than the one that ends documents: padding is one document, not many.
    std::fill(into.begin(), into.end(), corpus_->end_of_document() == 0 ? 1 : 0);
    std::fill(learnt.begin(), learnt.end(), uint8_t{0});
    size_t begin = 0;
    for (const DocumentRange& each : packed_->window(window)) {
      const auto count = static_cast<size_t>(each.num_tokens);
      corpus_->read(each.first_token, into.subspan(begin, count),
                    learnt.empty() ? learnt : learnt.subspan(begin, count));
      begin += count;
    }
    return;
  }
  corpus_->read(first_token(window), into, learnt);
}

bool TokenWindows::have_learnt() const {
  if (!corpus_->has_mask()) return num_windows_ > 0;
  std::vector<int64_t> tokens(static_cast<size_t>(sequence_) + 1);
  std::vector<uint8_t> learnt(tokens.size());
  for (int64_t window = 0; window < num_windows_; ++window) {
    read(window, tokens, learnt);
    if (std::count(learnt.begin() + 1, learnt.end(), uint8_t{1}) > 0) return true;
  }
  return false;
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

// Cuts between documents: as many of the last ones as have the share of the tokens. A text that is
// longer than a window, and would be more than they need, is cut itself.
std::pair<Range, Range> split_documents(const Corpus& corpus, const Range& range,
                                        const SplitOptions& options) {
  const double fraction = options.validation_fraction;
  const std::vector<DocumentRange> documents = documents_in(corpus, range);
  const int64_t end = range.first_token + range.num_tokens;
  size_t num_trained = documents.size();
  int64_t cut = end;
  const auto share =
      static_cast<int64_t>(std::ceil(fraction * static_cast<double>(range.num_tokens)));
  while (fraction > 0 && num_trained > 0 && (cut == end || end - cut < share)) {
    const DocumentRange& next = documents[--num_trained];
    const int64_t wanted = std::max(share - (end - cut), options.sequence + 1);
    if (next.is_text && next.num_tokens > wanted + options.sequence) {
      cut -= wanted;
      break;
    }
    cut = next.first_token;
  }
  if (cut == range.first_token)
    throw UsageError(concat(
        "the data has ", counted_text(static_cast<int64_t>(documents.size()), "document"),
        " where ", fraction > 0 ? "training and validation need one each" : "training needs one",
        "; give more data"));
  return {{range.first_token, cut - range.first_token}, {cut, end - cut}};
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
    const Range range{begin, end - begin};
    const auto [trained, kept] = options.content == WindowContent::kDocuments
                                     ? split_documents(*corpus, range, options)
                                     : split_range(range, options);
    training.push_back(trained);
    validation.push_back(kept);
    begin = end;
  }
  return {TokenWindows(corpus, sequence, training, options.content),
          TokenWindows(corpus, sequence, validation, options.content)};
}

TokenWindows all_windows(const std::shared_ptr<const Corpus>& corpus, int64_t sequence,
                         WindowContent content) {
  check_sequence(sequence);
  TokenWindows all(corpus, sequence, {{0, corpus->num_tokens()}}, content);
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
  const auto check = [](const char* what, const auto& before, const auto& now, const auto& text_of,
                        const char* fix) {
    if (before != now)
      throw UsageError(concat(what, " was ", text_of(before), " when the run was saved and is ",
                              text_of(now), " now, so its place in the data cannot be found; ", fix,
                              ", or begin the data anew (--restart-data)"));
  };
  const auto as_number = [](auto number) { return concat(number); };
  check("the data's fingerprint", position.fingerprint, here.fingerprint, fingerprint_text,
        "give the same files in the same order");
  check("sequence", position.sequence, here.sequence, as_number, "use the same");
  check("the number of training windows", position.num_windows, here.num_windows, as_number,
        "keep the same share for validation");
  check("the data's seed", position.seed, here.seed, as_number, "use the same");
  check("the mix of the data", position.sources, here.sources, mix_text,
        "give the same --data with the same --data-weights");
}

// --- the mix of sources --------------------------------------------------------------------------

std::vector<int64_t> source_shares(std::span<const double> weights) {
  FSDP_ASSERT(!weights.empty());
  double sum = 0;
  for (const double weight : weights) {
    if (!(weight > 0) || !std::isfinite(weight))
      throw UsageError(concat("a weight of the data is ", weight,
                              "; it must be a number above 0; leave the data out for none of it"));
    sum += weight;
  }
  std::vector<int64_t> shares;
  std::vector<double> rests;
  for (const double weight : weights) {
    const double exact = weight / sum * static_cast<double>(kSourceShares);
    // A weight of 0.3 is 3000 shares, whatever the rounding of the quotient.
    shares.push_back(static_cast<int64_t>(std::floor(exact + 1e-6)));
    rests.push_back(exact - static_cast<double>(shares.back()));
    if (shares.back() < 1)
      throw UsageError(concat("a weight of the data is ", weight, " of ", sum,
                              ", less than one window in ", kSourceShares,
                              "; raise it, or leave that data out"));
  }
  // The rest of rounding goes to those that lost most by it.
  for (int64_t left = kSourceShares - std::accumulate(shares.begin(), shares.end(), int64_t{0});
       left > 0; --left) {
    const auto most = std::max_element(rests.begin(), rests.end());
    ++shares[static_cast<size_t>(most - rests.begin())];
    *most -= 1;
  }
  return shares;
}

SourceMix::SourceMix(std::vector<int64_t> shares) : shares_(std::move(shares)) {
  FSDP_ASSERT(std::accumulate(shares_.begin(), shares_.end(), int64_t{0}) == kSourceShares);
  std::vector<int64_t> taken(shares_.size(), 0);
  for (int64_t place = 0; place < kSourceShares; ++place) {
    size_t next = shares_.size();
    int64_t first_end = kSourceShares + 1;
    for (size_t source = 0; source < shares_.size(); ++source) {
      const int64_t begin = taken[source] * kSourceShares / shares_[source];
      const int64_t end = ceil_div((taken[source] + 1) * kSourceShares, shares_[source]);
      if (begin > place || end >= first_end) continue;
      next = source;
      first_end = end;
    }
    block_.push_back({static_cast<int64_t>(next), taken[next]++});
  }
}

SourceMix::Place SourceMix::at(int64_t place) const {
  Place result = block_[static_cast<size_t>(place % kSourceShares)];
  result.index += place / kSourceShares * shares_[static_cast<size_t>(result.source)];
  return result;
}

int64_t SourceMix::count(int64_t source, int64_t num_places) const {
  const auto rest = block_.begin() + num_places % kSourceShares;
  return num_places / kSourceShares * shares_[static_cast<size_t>(source)] +
         std::count_if(block_.begin(), rest,
                       [source](const Place& place) { return place.source == source; });
}

}  // namespace fsdp
