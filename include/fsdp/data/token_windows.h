// A corpus cut into windows of sequence + 1 tokens, the part of them that is kept for validation,
// and how far a run has read them, as a text that a checkpoint keeps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdp/data/corpus.h"

namespace fsdp {

class PackedDocuments;

// A window has either of these: a stretch of the corpus, or whole documents, as many as fit.
enum class WindowContent : uint8_t { kStretch, kDocuments };

// Neighbouring windows share one token: the last target of one is the first input of the next, so
// that every token but the first is predicted once. What is too short for a window in the end is
// left out. Windows go over ends of documents and files, and stay inside a range.
//
// Windows of whole documents (PackedDocuments) have none of that: they end with padding, which is
// not learnt. A row that is longer than the sequence loses its end, while a longer text goes over
// several windows.
class TokenWindows {
 public:
  struct Range {
    int64_t first_token = 0;
    int64_t num_tokens = 0;
  };

  // All windows in each of the ranges, one range after the other.
  TokenWindows(std::shared_ptr<const Corpus> corpus, int64_t sequence,
               const std::vector<Range>& ranges, WindowContent content = WindowContent::kStretch);

  const Corpus& corpus() const { return *corpus_; }
  int64_t sequence() const { return sequence_; }
  int64_t num_windows() const { return num_windows_; }

  // For each range the number of its first window, and the number of all windows in the end.
  const std::vector<int64_t>& range_begins() const { return range_begins_; }

  // Its first token's number in the corpus.
  int64_t first_token(int64_t window) const;

  // Its sequence + 1 tokens; `learnt` as of Corpus::read().
  void read(int64_t window, std::span<int64_t> into, std::span<uint8_t> learnt = {}) const;

  // Whether any window has a token to predict that is learnt. Reads windows until one has.
  bool have_learnt() const;

 private:
  std::shared_ptr<const Corpus> corpus_;
  int64_t sequence_;
  std::shared_ptr<const PackedDocuments> packed_;  // null: stretches
  std::vector<int64_t> first_tokens_;              // of ranges
  std::vector<int64_t> range_begins_;
  int64_t num_windows_ = 0;
};

struct SplitOptions {
  int64_t sequence = 256;  // tokens that a window predicts
  double validation_fraction =
      0.01;  // of the windows, at the end of the corpus, one at least; 0: none
  // Windows stay inside the paths of the corpus, and the end of each is kept for validation. For
  // sources with weights.
  bool by_path = false;
  WindowContent content = WindowContent::kStretch;
};

// No token is in both.
struct DataSplit {
  TokenWindows training;
  TokenWindows validation;
};

// UsageError where the corpus is too short for a window of each kind.
DataSplit split_corpus(const std::shared_ptr<const Corpus>& corpus, const SplitOptions& options);

// The whole corpus: for validation data of its own. UsageError where it has no window.
TokenWindows all_windows(const std::shared_ptr<const Corpus>& corpus, int64_t sequence,
                         WindowContent content = WindowContent::kStretch);

// One of the paths of --data that has a weight.
struct WeightedSource {
  int64_t num_windows = 0;  // for training
  int64_t share = 0;        // of each 10,000 windows

  bool operator==(const WeightedSource&) const = default;
};

// How far a run has read its data. The same for every rank, and it does not know of ranks, batch or
// microbatches: another number of each goes on with the window after the last one that was used.
struct DataPosition {
  int64_t windows_used = 0;                  // of the endless order, epoch after epoch
  uint64_t seed = 0;                         // of the order
  int64_t sequence = 0;                      // tokens that a window predicts
  int64_t num_windows = 0;                   // for training: of an epoch
  uint64_t fingerprint = 0;                  // of the corpus
  std::vector<WeightedSource> sources = {};  // none: windows have no weights

  bool operator==(const DataPosition&) const = default;
};

// One line of JSON.
std::string to_json(const DataPosition& position);

// UsageError that begins with `source` for whatever to_json() does not write.
DataPosition parse_data_position(const std::string& text, const std::string& source);

// Where a run begins. `weights`: none, or one for each range of the windows.
DataPosition first_position(const TokenWindows& windows, uint64_t seed,
                            std::span<const double> weights = {});

// UsageError where `position` is one in another order than that of `windows`, `seed` and `weights`:
// other tokens, sequence length, share for validation, weights or seed. A program that goes on all
// the same begins with first_position().
void check_same_order(const DataPosition& position, const TokenWindows& windows, uint64_t seed,
                      std::span<const double> weights = {});

// --- the mix of sources --------------------------------------------------------------------------

// Sources take turns in the order of windows, in given proportions.

// Proportions are whole shares of so many. Rounding changes none by more than one share, and
// weights of up to four decimals that add up to 1 not at all.
inline constexpr int64_t kSourceShares = 10'000;

// One for each weight, kSourceShares in all. UsageError for weights that are no numbers above 0, or
// too small for a share.
std::vector<int64_t> source_shares(std::span<const double> weights);

// Places are taken in blocks of kSourceShares, in each of which a source has as many as its shares.
// Its k-th place in a block should lie from k to k + 1 times kSourceShares / share, and of those
// that may come next the one whose time ends first does: so all have theirs in time, and any run of
// places has the proportions but for less than two. A function of place and shares alone; whole
// numbers, so that every machine has the same.
class SourceMix {
 public:
  explicit SourceMix(std::vector<int64_t> shares);

  struct Place {
    int64_t source = 0;
    int64_t index = 0;  // how many places before it are the source's
  };
  Place at(int64_t place) const;

  // How many of the first `num_places` are the source's.
  int64_t count(int64_t source, int64_t num_places) const;

 private:
  std::vector<int64_t> shares_;
  std::vector<Place> block_;
};

}  // namespace fsdp
