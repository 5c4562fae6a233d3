// What must be the same on every rank, compared when ranks meet: nobody trains on, wrongly.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "fsdp/comm/communicator.h"

namespace fsdp {

// Names and values, as a person would write them: {"--lr", "0.004"}. The same names on every rank.
using RankFacts = std::vector<std::pair<std::string, std::string>>;

// The first fact that differs between ranks, with both values: "rank 2 has --lr '0.1' and rank 0
// has '0.004'"; "" where all agree, for which one number per rank travels. The same words on every
// rank: whoever throws them does so when the communicators are closed, or would cut off ranks that
// still wait for the last of them. Every rank calls it.
std::string difference_of(Communicator& ranks, const RankFacts& facts);

}  // namespace fsdp
