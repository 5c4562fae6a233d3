// Which source each place of the order of windows is taken from, in given proportions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp {

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
