#include "fsdp/comm/rank_facts.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/reduce/sum_order.h"

namespace fsdp {

namespace {

// FNV-1a, cut to 62 bits so that its negative is a number, too.
int64_t digest_of(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return static_cast<int64_t>(hash >> 2);
}

// The axes along which ranks lie, inner first.
using Axes = std::vector<Communicator*>;

Axes axes_of(const Mesh& mesh) {
  Axes axes;
  for (const MeshAxis* axis : {&mesh.inner(), &mesh.outer()})
    if (axis->size() > 1) axes.push_back(&axis->gather());
  return axes;
}

// Names and values in turn, each ended by a zero, which none contains.
std::string text_of(const RankFacts& facts) {
  std::string text;
  for (const auto& [name, value] : facts)
    for (const std::string& part : {name, value}) (text += part).push_back('\0');
  return text;
}

RankFacts facts_in(const std::string& text) {
  RankFacts facts;
  auto next = [&text, begin = size_t{0}]() mutable {
    const size_t end = text.find('\0', begin);
    const std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    return part;
  };
  const auto num_parts = std::count(text.begin(), text.end(), '\0');
  for (int64_t i = 0; i < num_parts / 2; ++i) {
    std::string name = next();
    facts.emplace_back(std::move(name), next());
  }
  return facts;
}

void take_greatest(const Axes& axes, const at::Tensor& numbers) {
  for (Communicator* axis : axes)
    axis->all_reduce(numbers, {.op = ReduceOp::kMax}, "settings").wait();
}

// The greatest of all ranks' numbers, and of their negatives: the same on every rank, and where no
// data moves (a simulated world) this rank's own.
bool is_same_everywhere(const Axes& axes, int64_t mine) {
  const at::Tensor both = at::tensor({mine, -mine}, at::kLong);
  take_greatest(axes, both);
  return both[0].item<int64_t>() == -both[1].item<int64_t>();
}

// The texts of all ranks, by rank. Every rank sends as many bytes: a length, the text, and zeros.
std::vector<std::string> texts_along(const Axes& axes, const std::string& mine) {
  const at::Tensor width = at::tensor({static_cast<int64_t>(mine.size())}, at::kLong);
  take_greatest(axes, width);
  const auto length = width[0].item<int64_t>();
  at::Tensor all = at::zeros({8 + length}, at::kByte);
  const auto own_length = static_cast<int64_t>(mine.size());
  std::memcpy(all.mutable_data_ptr(), &own_length, 8);
  std::memcpy(static_cast<char*>(all.mutable_data_ptr()) + 8, mine.data(), mine.size());
  for (Communicator* axis : axes) {
    const at::Tensor more = at::zeros({axis->size() * all.numel()}, at::kByte);
    axis->all_gather(more, all, "settings").wait();
    all = more;
  }
  std::vector<std::string> texts;
  for (const char* text = static_cast<const char*>(all.const_data_ptr());
       texts.size() < static_cast<size_t>(all.numel() / (8 + length)); text += 8 + length) {
    int64_t num_chars = 0;
    std::memcpy(&num_chars, text, 8);
    texts.emplace_back(text + 8, static_cast<size_t>(num_chars));
  }
  return texts;
}

// Waits until all ranks have gathered the facts: a rank that throws earlier would end the others'
// gather. If another rank throws during this wait, this rank has the facts already, so the error is
// only logged.
void wait_for_others(const Axes& axes) {
  try {
    for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis)
      (*axis)->barrier("settings").wait();
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, "another rank has left: ", error.what());
  }
}

std::vector<std::string> texts_for_all(const Axes& axes, const std::string& mine) {
  std::vector<std::string> texts = texts_along(axes, mine);
  wait_for_others(axes);
  return texts;
}

// "" where they are the same.
std::string first_difference(size_t rank, const RankFacts& other, const RankFacts& first) {
  for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
    if (i >= first.size())
      return concat("rank ", rank, " has ", other[i].first, " '", other[i].second,
                    "' and rank 0 has none");
    if (i >= other.size())
      return concat("rank ", rank, " has no ", first[i].first, " and rank 0 has '", first[i].second,
                    "'");
    if (other[i] != first[i])
      return concat("rank ", rank, " has ", other[i].first, " '", other[i].second,
                    "' and rank 0 has ",
                    other[i].first == first[i].first ? "" : concat(first[i].first, " "), "'",
                    first[i].second, "'");
  }
  return "";
}

std::string difference_along(const Axes& axes, const RankFacts& facts) {
  const std::string mine = text_of(facts);
  if (axes.empty() || is_same_everywhere(axes, digest_of(mine))) return "";
  const std::vector<std::string> texts = texts_for_all(axes, mine);
  const RankFacts first = facts_in(texts[0]);
  for (size_t rank = 1; rank < texts.size(); ++rank)
    if (std::string words = first_difference(rank, facts_in(texts[rank]), first); !words.empty())
      return words;
  return "ranks have other settings";
}

// A place as text for the wire, and back.
std::string text_of(const RankPlace& place) {
  return concat(static_cast<int>(place.nccl), place.has_nccl ? 1 : 0, place.sum_group, "\n",
                place.gpu, "\n", place.host);
}

RankPlace place_in(const std::string& text) {
  const size_t end_of_group = text.find('\n');
  const size_t end_of_gpu = text.find('\n', end_of_group + 1);
  FSDP_ASSERT(text.size() >= 2 && end_of_gpu != std::string::npos, "place '", text, "'");
  return {.host = text.substr(end_of_gpu + 1),
          .gpu = text.substr(end_of_group + 1, end_of_gpu - end_of_group - 1),
          .has_nccl = text[1] == '1',
          .nccl = static_cast<NcclUse>(text[0] - '0'),
          .sum_group = std::stoi(text.substr(2, end_of_group - 2))};
}

// The first rank for which `holds` is true; -1 for none.
template <typename Holds>
int first_rank(std::span<const RankPlace> ranks, const Holds& holds) {
  const auto found = std::find_if(ranks.begin(), ranks.end(), holds);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

bool share_gpu(const RankPlace& a, const RankPlace& b) {
  return a.host == b.host && a.gpu == b.gpu;
}

// Why NCCL cannot connect these ranks; "" where it can.
std::string obstacle_to_nccl(std::span<const RankPlace> ranks) {
  const int without_gpu = first_rank(ranks, [](const RankPlace& rank) { return rank.gpu.empty(); });
  if (without_gpu >= 0) {
    const int with_gpu = first_rank(ranks, [](const RankPlace& rank) { return !rank.gpu.empty(); });
    return with_gpu < 0 ? "no rank sees a GPU" : concat("rank ", without_gpu, " sees no GPU");
  }
  const int without_nccl = first_rank(ranks, [](const RankPlace& rank) { return !rank.has_nccl; });
  if (without_nccl >= 0) return concat("the build of rank ", without_nccl, " has no NCCL");
  for (size_t second = 1; second < ranks.size(); ++second) {
    const int first = first_rank(
        ranks.first(second), [&](const RankPlace& rank) { return share_gpu(rank, ranks[second]); });
    if (first >= 0)
      return concat("ranks ", first, " and ", second, " share the GPU ", ranks[second].gpu);
  }
  return "";
}

// How tensors travel between these ranks.
Transport carrier_of(std::span<const RankPlace> ranks, const std::string& carrier) {
  const NcclUse use = ranks.front().nccl;
  const int other = first_rank(ranks, [&](const RankPlace& rank) { return rank.nccl != use; });
  if (other >= 0)
    return {.error = concat("FSDP_NCCL is ", name_of(ranks[static_cast<size_t>(other)].nccl),
                            " on rank ", other, " and ", name_of(use),
                            " on rank 0: set it alike on all ranks")};
  const std::string obstacle = use == NcclUse::kAlways ? ""
                               : use == NcclUse::kOff  ? "NCCL is off"
                                                       : obstacle_to_nccl(ranks);
  if (!obstacle.empty())
    return {.sentence =
                concat("tensors travel through host memory over ", carrier, ": ", obstacle)};
  std::set<std::string> hosts;
  for (const RankPlace& rank : ranks) hosts.insert(rank.host);
  const std::string why =
      use == NcclUse::kAlways
          ? "FSDP_NCCL is always"
          : concat(counted_text(std::ssize(ranks), "rank"), " on ",
                   counted_text(std::ssize(hosts), "host"), ", each with a GPU of its own");
  return {.by_nccl = true, .sentence = concat("tensors travel by NCCL: ", why)};
}

}  // namespace

std::string difference_of(Communicator& ranks, const RankFacts& facts) {
  return difference_along(ranks.size() > 1 ? Axes{&ranks} : Axes{}, facts);
}

std::string difference_of(const Mesh& mesh, const RankFacts& facts) {
  return difference_along(axes_of(mesh), facts);
}

std::vector<std::string> texts_of_ranks(Communicator& ranks, const std::string& mine) {
  return texts_for_all({&ranks}, mine);
}

std::vector<std::string> texts_of_ranks(const Mesh& mesh, const std::string& mine) {
  return texts_for_all(axes_of(mesh), mine);
}

std::vector<RankPlace> places_of_ranks(Communicator& ranks, const RankPlace& mine) {
  std::vector<RankPlace> places;
  for (const std::string& text : texts_of_ranks(ranks, text_of(mine)))
    places.push_back(place_in(text));
  return places;
}

std::string this_host() {
  if (std::optional<std::string> given = env_text("NCCL_HOSTID")) return *given;
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;  // hosts may have one name, "localhost"
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return concat(name.data(), " ", boot);
}

Transport choose_transport(std::span<const RankPlace> ranks, const std::string& carrier) {
  const int given = ranks.front().sum_group;
  const int odd = first_rank(ranks, [&](const RankPlace& rank) { return rank.sum_group != given; });
  if (odd >= 0)
    return {.error = concat("FSDP_SUM_GROUP is ", ranks[static_cast<size_t>(odd)].sum_group,
                            " on rank ", odd, " and ", given,
                            " on rank 0: set it alike on all ranks (0 is the ranks of a host)")};
  Transport transport = carrier_of(ranks, carrier);
  if (!transport.error.empty()) return transport;
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (const RankPlace& rank : ranks)
    hosts.push_back(numbers.try_emplace(rank.host, static_cast<int>(numbers.size())).first->second);
  transport.sum_group = chosen_group(given, hosts);
  const SumOrder order{.ranks = static_cast<int>(ranks.size()), .group = transport.sum_group};
  if (order.has_two_hops())
    transport.sentence +=
        concat("; gradients are added in groups of ", transport.sum_group, " ranks first");
  else if (transport.sum_group == 1 && given == 0 && numbers.size() > 1 &&
           numbers.size() < ranks.size())
    transport.sentence +=
        "; hosts have unequal numbers of ranks, so none adds its own first, and a network carries "
        "every rank's gradients";
  return transport;
}

int ranks_on_gpu_of(int rank, std::span<const RankPlace> ranks) {
  const RankPlace& place = ranks[static_cast<size_t>(rank)];
  if (place.gpu.empty()) return 0;
  return static_cast<int>(std::count_if(
      ranks.begin(), ranks.end(), [&](const RankPlace& other) { return share_gpu(place, other); }));
}

}  // namespace fsdp
