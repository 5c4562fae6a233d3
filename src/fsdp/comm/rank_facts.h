// What ranks tell each other when they meet. Facts that must be the same everywhere are compared:
// nobody trains on, wrongly.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"

namespace fsdp {

// Names and values, as a person would write them: {"--lr", "0.004"}.
using RankFacts = std::vector<std::pair<std::string, std::string>>;

// The first fact that differs between ranks, with both values: "rank 2 has --lr '0.1' and rank 0
// has '0.004'"; "" where all agree, for which one number per rank travels. Every rank calls it and
// has the same words before one of them returns, so that they may be thrown at once.
std::string difference_of(Communicator& ranks, const RankFacts& facts);
// The same of all ranks of a mesh, numbered as in its world.
std::string difference_of(const Mesh& mesh, const RankFacts& facts);

// The texts of all ranks, in rank order. Every rank calls it and has them before one of them
// returns.
std::vector<std::string> texts_of_ranks(Communicator& ranks, const std::string& mine);
std::vector<std::string> texts_of_ranks(const Mesh& mesh, const std::string& mine);

// The shortest text that reads back as the same number: no bit of a difference is lost.
std::string number_fact(double value);

// An enumerator by its name; one without a name here is its number, and differs all the same.
template <typename Enum>
std::string choice_fact(Enum value, std::initializer_list<const char*> names) {
  const auto index = static_cast<size_t>(value);
  return index < names.size() ? names.begin()[index] : std::to_string(index);
}

}  // namespace fsdp
