#include "fsdp/comm/rank_facts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// FNV-1a, cut to 62 bits so that its negative is a number, too.
int64_t digest_of(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return static_cast<int64_t>(hash >> 2);
}

// Values in turn, each ended by a zero, which no value contains.
std::string values_of(const RankFacts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) {
    text += value;
    text.push_back('\0');
  }
  return text;
}

std::vector<std::string> split_values(const std::string& text) {
  std::vector<std::string> values;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\0', begin);
    values.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return values;
}

// The greatest of all ranks' numbers, and of their negatives: the same on every rank, and where no
// data moves (a simulated world) this rank's own.
bool is_same_everywhere(Communicator& ranks, int64_t mine) {
  const at::Tensor both = at::tensor({mine, -mine}, at::kLong);
  ranks.all_reduce(both, {.op = ReduceOp::kMax}, "settings").wait();
  return both[0].item<int64_t>() == -both[1].item<int64_t>();
}

std::vector<std::string> texts_of_ranks(Communicator& ranks, const std::string& mine) {
  const at::Tensor length = at::full({1}, static_cast<int64_t>(mine.size()), at::kLong);
  const at::Tensor lengths = at::zeros({ranks.size()}, at::kLong);
  ranks.all_gather(lengths, length, "lengths of settings").wait();
  const int64_t width = lengths.max().item<int64_t>();
  const at::Tensor padded = at::zeros({width}, at::kByte);
  std::memcpy(padded.mutable_data_ptr(), mine.data(), mine.size());
  const at::Tensor all = at::zeros({ranks.size() * width}, at::kByte);
  ranks.all_gather(all, padded, "settings").wait();
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < ranks.size(); ++rank)
    texts.emplace_back(static_cast<const char*>(all.const_data_ptr()) + rank * width,
                       static_cast<size_t>(lengths[rank].item<int64_t>()));
  return texts;
}

}  // namespace

std::string difference_of(Communicator& ranks, const RankFacts& facts) {
  const std::string mine = values_of(facts);
  if (ranks.size() == 1 || is_same_everywhere(ranks, digest_of(mine))) return "";
  const std::vector<std::string> texts = texts_of_ranks(ranks, mine);
  const std::vector<std::string> first = split_values(texts[0]);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const std::vector<std::string> other = split_values(texts[rank]);
    const size_t count = std::min({first.size(), other.size(), facts.size()});
    for (size_t i = 0; i < count; ++i)
      if (first[i] != other[i])
        return concat("rank ", rank, " has ", facts[i].first, " '", other[i], "' and rank 0 has '",
                      first[i], "'");
  }
  return "ranks have other sets of settings";
}

}  // namespace fsdp
