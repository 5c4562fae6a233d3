#include "fsdp/data/batches.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {
namespace {

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

template <typename WindowOfRow>
TokenBatch read_rows(const TokenWindows& windows, int64_t rows, const WindowOfRow& window_of_row) {
  const int64_t columns = windows.sequence() + 1;
  TokenBatch batch{.tokens = memory_for(rows, columns), .rows = rows, .columns = columns};
  const std::span<int64_t> tokens(batch.tokens);
  for (int64_t row = 0; row < rows; ++row)
    windows.read(window_of_row(row),
                 tokens.subspan(static_cast<size_t>(row * columns), static_cast<size_t>(columns)));
  return batch;
}

}  // namespace

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

TrainingBatches::TrainingBatches(TokenWindows windows, const BatchOptions& options)
    : windows_(std::move(windows)), options_(options), rows_(0) {
  check_batch(options);
  FSDP_ASSERT(windows_.num_windows() >= 1, "no windows to train on");
  rows_ = options.batch / (options.ranks * options.microbatches);
}

int64_t TrainingBatches::window_at(int64_t place) const {
  const int64_t size = windows_.num_windows();
  const Permutation order(size, options_.seed, static_cast<uint64_t>(place / size));
  return order(place % size);
}

TokenBatch TrainingBatches::read(int64_t place, int64_t microbatch) const {
  FSDP_ASSERT(place >= 0 && microbatch >= 0 && microbatch < options_.microbatches, "place ", place,
              ", microbatch ", microbatch);
  const int64_t first = place + (microbatch * options_.ranks + options_.rank) * rows_;
  return read_rows(windows_, rows_, [&](int64_t row) { return window_at(first + row); });
}

ValidationBatches::ValidationBatches(TokenWindows windows, const ValidationOptions& options)
    : windows_(std::move(windows)), options_(options), rows_(0), num_batches_(0) {
  check_positive("validation batch", options.batch);
  check_rank(options.rank, options.ranks);
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
  return read_rows(windows_, rows_,
                   [&](int64_t row) { return (first + row) % windows_.num_windows(); });
}

}  // namespace fsdp
