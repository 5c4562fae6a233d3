#include "fsdp/data/batches.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/data/token_windows.h"

namespace fsdp {

namespace {

// An even number, so that halves of unequal length end where they began. For long halves 4 rounds
// make a permutation that cannot be told from a random one; short halves need more.
constexpr uint64_t kRounds = 8;
// There are too few functions of less than 4 bits, so halves have at least 4; small sizes then take
// a few more rounds of the walk.
constexpr int kMinBits = 8;

constexpr uint64_t low_bits(uint64_t value, int num_bits) {
  return value & ((uint64_t{1} << num_bits) - 1);
}

void check_positive(const char* field, int64_t value) {
  if (value < 1) throw UsageError(concat(field, " is ", value, "; it must be at least 1"));
}

void check_rank(int64_t rank, int64_t ranks) {
  check_positive("ranks", ranks);
  FSDP_ASSERT(rank >= 0 && rank < ranks, "rank ", rank, " of ", ranks);
}

// "8 or 12": the multiples around a number that is none.
std::string nearest_multiples(int64_t value, int64_t factor) {
  const int64_t below = value / factor * factor;
  return below == 0 ? concat(factor) : concat(below, " or ", checked_add(below, factor));
}

void check_batch(const BatchOptions& options) {
  check_positive("batch", options.batch);
  check_positive("microbatches", options.microbatches);
  check_rank(options.rank, options.ranks);
  const int64_t parts = checked_mul(options.ranks, options.microbatches);
  if (options.batch % parts != 0)
    throw UsageError(concat("batch is ", options.batch, "; it must be a multiple of ", parts, " (",
                            options.ranks, options.ranks == 1 ? " rank" : " ranks", " x ",
                            options.microbatches,
                            options.microbatches == 1 ? " microbatch" : " microbatches", "), e.g. ",
                            nearest_multiples(options.batch, parts)));
}

std::vector<int64_t> memory_for(int64_t rows, int64_t columns) {
  try {
    return std::vector<int64_t>(static_cast<size_t>(checked_mul(rows, columns)));
  } catch (const std::exception&) {  // too much for the system, or for any vector
    const double bytes = static_cast<double>(rows) * static_cast<double>(columns) * sizeof(int64_t);
    throw Error(concat("cannot allocate ", bytes_text(bytes), " for ", grouped_text(rows),
                       " sequences of ", grouped_text(columns),
                       " tokens; use a smaller batch, or more microbatches"));
  }
}

// Returns how many of the targets of a row are learnt.
int64_t put_targets(std::span<const int64_t> tokens, std::span<const uint8_t> learnt,
                    std::span<int64_t> targets) {
  int64_t num_targets = 0;
  for (size_t i = 0; i < targets.size(); ++i) {
    targets[i] = learnt[i + 1] != 0 ? tokens[i + 1] : kNotLearnt;
    num_targets += learnt[i + 1];
  }
  return num_targets;
}

// A window that begins inside a document is the beginning of one for the model.
void separate_documents(TokenBatch& batch, int64_t end_of_document) {
  const int64_t sequence = batch.columns - 1;
  for (int64_t row = 0; row < batch.rows; ++row) {
    batch.document_starts.push_back(row * sequence);
    for (int64_t i = 0; i < sequence; ++i) {
      if (batch.tokens[static_cast<size_t>(row * batch.columns + i)] != end_of_document) continue;
      int64_t& target = batch.targets[static_cast<size_t>(row * sequence + i)];
      batch.num_targets -= target == kNotLearnt ? 0 : 1;
      target = kNotLearnt;
      if (i + 1 < sequence) batch.document_starts.push_back(row * sequence + i + 1);
    }
  }
}

void check_documents(const TokenWindows& windows, WindowDocuments documents) {
  if (documents == WindowDocuments::kJoined || windows.corpus().end_of_document()) return;
  throw UsageError(
      "documents cannot be separated, because no token ends them in the data (end of document "
      "none); pack it with such a token, or join them (--documents joined)");
}

template <typename WindowOfRow>
TokenBatch read_rows(const TokenWindows& windows, int64_t rows, WindowDocuments documents,
                     const WindowOfRow& window_of_row) {
  const int64_t sequence = windows.sequence();
  TokenBatch batch{.tokens = memory_for(rows, sequence + 1),
                   .rows = rows,
                   .columns = sequence + 1,
                   .targets = memory_for(rows, sequence)};
  std::vector<uint8_t> learnt(static_cast<size_t>(sequence) + 1);
  for (int64_t row = 0; row < rows; ++row) {
    const auto tokens =
        std::span(batch.tokens).subspan(static_cast<size_t>(row * batch.columns), learnt.size());
    windows.read(window_of_row(row), tokens, learnt);
    batch.num_targets += put_targets(
        tokens, learnt,
        std::span(batch.targets)
            .subspan(static_cast<size_t>(row * sequence), static_cast<size_t>(sequence)));
  }
  if (documents != WindowDocuments::kJoined)
    separate_documents(batch, *windows.corpus().end_of_document());
  return batch;
}

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint64_t round)
    : size_(size),
      key_(mixed_bits(mixed_bits(seed + 0x9E3779B97F4A7C15ull) + round)),
      lower_bits_(0),
      upper_bits_(0) {
  FSDP_ASSERT(size >= 1, size);
  const int bits =
      std::max(kMinBits, static_cast<int>(std::bit_width(static_cast<uint64_t>(size) - 1)));
  upper_bits_ = bits / 2;
  lower_bits_ = bits - upper_bits_;
}

uint64_t Permutation::permuted(uint64_t value) const {
  uint64_t upper = value >> lower_bits_;
  uint64_t lower = low_bits(value, lower_bits_);
  int upper_bits = upper_bits_;
  int lower_bits = lower_bits_;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    const uint64_t noise = mixed_bits(key_ + round * 0x9E3779B97F4A7C15ull + lower);
    const uint64_t next = upper ^ low_bits(noise, upper_bits);
    upper = std::exchange(lower, next);
    std::swap(upper_bits, lower_bits);
  }
  return upper << lower_bits_ | lower;
}

int64_t Permutation::operator()(int64_t index) const {
  FSDP_ASSERT(index >= 0 && index < size_, index, " of ", size_);
  if (size_ == 1) return 0;
  // Ends: a cycle of the larger permutation comes back to `index`, which is below size.
  auto value = static_cast<uint64_t>(index);
  do value = permuted(value);
  while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

TrainingBatches::TrainingBatches(TokenWindows windows, const BatchOptions& options)
    : windows_(std::move(windows)), options_(options), rows_(0) {
  check_batch(options);
  check_documents(windows_, options.documents);
  FSDP_ASSERT(windows_.num_windows() >= 1, "no windows to train on");
  rows_ = options.batch / (options.ranks * options.microbatches);
  if (options.source_weights.empty()) return;
  FSDP_ASSERT(windows_.range_begins().size() == options.source_weights.size() + 1,
              options.source_weights.size(), " weights");
  mix_ = std::make_shared<const SourceMix>(source_shares(options.source_weights));
}

int64_t TrainingBatches::window_at(int64_t place) const {
  const auto shuffled = [](int64_t index, int64_t size, uint64_t seed) {
    const Permutation order(size, seed, static_cast<uint64_t>(index / size));
    return order(index % size);
  };
  if (!mix_) return shuffled(place, windows_.num_windows(), options_.seed);
  const SourceMix::Place drawn = mix_->at(place);
  const int64_t* const begin = &windows_.range_begins()[static_cast<size_t>(drawn.source)];
  // Sources of equal length have orders of their own.
  const uint64_t seed = mixed_bits(options_.seed) + static_cast<uint64_t>(drawn.source);
  return begin[0] + shuffled(drawn.index, begin[1] - begin[0], seed);
}

std::vector<double> TrainingBatches::epochs(int64_t windows_used) const {
  const auto ratio = [](int64_t part, int64_t whole) {
    return static_cast<double>(part) / static_cast<double>(whole);
  };
  if (!mix_) return {ratio(windows_used, windows_.num_windows())};
  const std::vector<int64_t>& begins = windows_.range_begins();
  std::vector<double> result;
  for (size_t i = 0; i + 1 < begins.size(); ++i)
    result.push_back(
        ratio(mix_->count(static_cast<int64_t>(i), windows_used), begins[i + 1] - begins[i]));
  return result;
}

TokenBatch TrainingBatches::read(int64_t place, int64_t microbatch) const {
  FSDP_ASSERT(place >= 0 && microbatch >= 0 && microbatch < options_.microbatches, "place ", place,
              ", microbatch ", microbatch);
  const int64_t first = place + (microbatch * options_.ranks + options_.rank) * rows_;
  return read_rows(windows_, rows_, options_.documents,
                   [&](int64_t row) { return window_at(first + row); });
}

ValidationBatches::ValidationBatches(TokenWindows windows, const ValidationOptions& options)
    : windows_(std::move(windows)), options_(options), rows_(0), num_batches_(0) {
  check_positive("validation batch", options.batch);
  check_rank(options.rank, options.ranks);
  check_documents(windows_, options.documents);
  if (options.batch % options.ranks != 0)
    throw UsageError(concat("validation batch is ", options.batch,
                            "; it must be a multiple of the ", options.ranks, " ranks, e.g. ",
                            nearest_multiples(options.batch, options.ranks)));
  rows_ = options.batch / options.ranks;
  if (windows_.num_windows() > 0)
    num_batches_ = std::max<int64_t>(1, windows_.num_windows() / options.batch);
  if (options.max_batches > 0) num_batches_ = std::min(num_batches_, options.max_batches);
}

TokenBatch ValidationBatches::read(int64_t index) const {
  FSDP_ASSERT(index >= 0 && index < num_batches_, index, " of ", num_batches_);
  const int64_t first = index * options_.batch + options_.rank * rows_;
  return read_rows(windows_, rows_, options_.documents,
                   [&](int64_t row) { return (first + row) % windows_.num_windows(); });
}

}  // namespace fsdp
