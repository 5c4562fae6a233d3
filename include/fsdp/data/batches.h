// Which windows every step, microbatch and rank takes, in which shuffled order, and their tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/data/token_windows.h"

namespace fsdp {

class SourceMix;

// A shuffled order of the numbers 0 to size - 1 that takes no memory, whatever the size: a Feistel
// network over the next power of two, walked until it is below `size` again. The same
// numbers on every machine and in every version: runs are resumed by them.
class Permutation {
 public:
  // `size` >= 1. Another seed or round is another order.
  Permutation(int64_t size, uint64_t seed, uint64_t round);

  int64_t size() const { return size_; }

  // Where `index` (0 to size - 1) goes.
  int64_t operator()(int64_t index) const;

 private:
  uint64_t permuted(uint64_t value) const;  // of the power of two

  int64_t size_;
  uint64_t key_;
  int lower_bits_;  // of the two halves that the bits are cut in
  int upper_bits_;  // the same, or one less
};

// A target that is not learnt, as PyTorch and the models of fsdp/nn.h know it.
inline constexpr int64_t kNotLearnt = -100;

// A token's view of other documents in its window: the documents before its own, as one text, or
// nothing. Separate documents need a token that ends each; none of them predicts the next one's
// first token. Packed ones are separate, and whole (WindowContent::kDocuments).
enum class WindowDocuments : uint8_t { kJoined, kSeparate, kPacked };

constexpr WindowContent content_of(WindowDocuments documents) {
  return documents == WindowDocuments::kPacked ? WindowContent::kDocuments
                                               : WindowContent::kStretch;
}

// The input of one rank's model at once: rows of sequence + 1 tokens, row after row. The first
// `sequence` of a row are inputs, the last `sequence` their targets.
struct TokenBatch {
  std::vector<int64_t> tokens;
  int64_t rows = 0;
  int64_t columns = 0;  // sequence + 1
  // [rows, sequence]: the token after each input, or kNotLearnt.
  std::vector<int64_t> targets = {};
  int64_t num_targets = 0;  // that are learnt
  // Numbers of the first inputs of separate documents, counted row after row, those of
  // rows included.
  std::vector<int64_t> document_starts = {};
};

struct BatchOptions {
  int64_t batch = 8;         // rows of a step, of all ranks and microbatches together
  int64_t microbatches = 1;  // parts of a step that are computed one after the other
  int64_t ranks = 1;         // that share the rows (data-parallel)
  int64_t rank = 0;          // this one
  uint64_t seed = 0;         // of the order of training windows
  // One above 0 for each range of the windows (SplitOptions::by_path): the proportions in which
  // windows are drawn from them. None: windows of all ranges are shuffled together.
  std::vector<double> source_weights = {};
  WindowDocuments documents = WindowDocuments::kJoined;
};

// The training windows, shuffled anew in every epoch, without end. A step takes the next `batch`
// windows of this order; microbatch m of rank r has the rows from (m * ranks + r) * rows on. So a
// step's windows depend on tokens, sequence, seed and place alone, and a microbatch's also on how
// many there are, but never on the number of ranks.
class TrainingBatches {
 public:
  // UsageError where ranks * microbatches does not divide the batch, with the nearest that work.
  TrainingBatches(TokenWindows windows, const BatchOptions& options);

  int64_t rows() const { return rows_; }  // of this rank's microbatch
  const BatchOptions& options() const { return options_; }
  const TokenWindows& windows() const { return windows_; }

  // The window at a place of the endless order; its epoch is place / num_windows(). With weights
  // each source has epochs of its own.
  int64_t window_at(int64_t place) const;

  // How often each range was gone through after so many windows of the order; without weights there
  // is one.
  std::vector<double> epochs(int64_t windows_used) const;

  // Rows of this rank's microbatch in the step that begins at `place` (0 and then every `batch`).
  // Any number of threads may call it at a time.
  TokenBatch read(int64_t place, int64_t microbatch) const;

 private:
  TokenWindows windows_;
  BatchOptions options_;
  std::shared_ptr<const SourceMix> mix_;  // null: no weights
  int64_t rows_;
};

struct ValidationOptions {
  int64_t batch = 8;        // rows of a batch, of all ranks together
  int64_t ranks = 1;        // that share the rows
  int64_t rank = 0;         // this one
  int64_t max_batches = 0;  // 0: as many as there are
  WindowDocuments documents = WindowDocuments::kJoined;
};

// Validation windows in the order of the corpus, in whole batches: what is left over in the end is
// dropped. Where there are fewer windows than rows, there is one batch, in which windows repeat.
// Any number of ranks takes the same windows.
class ValidationBatches {
 public:
  // UsageError where ranks do not divide the batch.
  ValidationBatches(TokenWindows windows, const ValidationOptions& options);

  int64_t num_batches() const { return num_batches_; }  // 0 without windows
  int64_t rows() const { return rows_; }

  // This rank's rows.
  TokenBatch read(int64_t index) const;

 private:
  TokenWindows windows_;
  ValidationOptions options_;
  int64_t rows_;
  int64_t num_batches_;
};

}  // namespace fsdp
