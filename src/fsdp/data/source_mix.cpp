#include "fsdp/data/source_mix.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

namespace fsdp {

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
  // What rounding left over goes to those that lost most by it.
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
