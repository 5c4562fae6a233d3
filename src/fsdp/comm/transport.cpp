#include "fsdp/comm/transport.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"

namespace fsdp {

namespace {

const char* word_of(NcclUse use) {
  switch (use) {
    case NcclUse::kAuto:
      return "auto";
    case NcclUse::kOff:
      return "off";
    case NcclUse::kAlways:
      return "always";
  }
  FSDP_ASSERT(false, "NcclUse ", static_cast<int>(use));
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

}  // namespace

std::string text_of(const RankPlace& place) {
  return concat(static_cast<int>(place.nccl), place.has_nccl ? 1 : 0, place.gpu, "\n", place.host);
}

RankPlace place_in(const std::string& text) {
  const size_t end_of_gpu = text.find('\n');
  FSDP_ASSERT(text.size() >= 2 && end_of_gpu != std::string::npos, "place '", text, "'");
  return {.host = text.substr(end_of_gpu + 1),
          .gpu = text.substr(2, end_of_gpu - 2),
          .has_nccl = text[1] == '1',
          .nccl = static_cast<NcclUse>(text[0] - '0')};
}

std::string this_host() {
  if (std::optional<std::string> given = env_text("NCCL_HOSTID")) return *given;
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;  // hosts may have one name, "localhost"
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return concat(name.data(), " ", boot);
}

Transport choose_transport(std::span<const RankPlace> ranks) {
  const NcclUse use = ranks.front().nccl;
  const int other = first_rank(ranks, [&](const RankPlace& rank) { return rank.nccl != use; });
  if (other >= 0)
    return {.error = concat("FSDP_NCCL is ", word_of(ranks[static_cast<size_t>(other)].nccl),
                            " on rank ", other, " and ", word_of(use),
                            " on rank 0: set it alike on all ranks")};
  if (use == NcclUse::kAlways) return {.by_nccl = true, .why = "FSDP_NCCL is always"};
  if (use == NcclUse::kOff) return {.why = "NCCL is off"};
  std::string obstacle = obstacle_to_nccl(ranks);
  if (!obstacle.empty()) return {.why = std::move(obstacle)};
  std::set<std::string> hosts;
  for (const RankPlace& rank : ranks) hosts.insert(rank.host);
  return {.by_nccl = true,
          .why = concat(counted_text(std::ssize(ranks), "rank"), " on ",
                        counted_text(std::ssize(hosts), "host"), ", each with a GPU of its own")};
}

int ranks_on_gpu_of(int rank, std::span<const RankPlace> ranks) {
  const RankPlace& place = ranks[static_cast<size_t>(rank)];
  if (place.gpu.empty()) return 0;
  return static_cast<int>(std::count_if(
      ranks.begin(), ranks.end(), [&](const RankPlace& other) { return share_gpu(place, other); }));
}

std::string sentence_of(const Transport& transport, const std::string& carrier) {
  return transport.by_nccl
             ? concat("tensors travel by NCCL: ", transport.why)
             : concat("tensors travel through host memory over ", carrier, ": ", transport.why);
}

}  // namespace fsdp
