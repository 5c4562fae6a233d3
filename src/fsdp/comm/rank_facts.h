// Ranks tell each other facts when they meet. Facts that must be the same everywhere are compared:
// nobody trains on, wrongly. Facts about their hosts decide how tensors travel between processes:
// by NCCL, or through host memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/option_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"

namespace fsdp {

// Names and values, as a person would write them: {"--lr", "0.004"}.
using RankFacts = std::vector<std::pair<std::string, std::string>>;

// The first fact that differs between ranks, with both values: "rank 2 has --lr '0.1' and rank 0
// has '0.004'"; "" where all agree, for which one number per rank travels. Every rank calls it and
// has the same words before one of them returns, so that they may be thrown at once.
std::string difference_of(Communicator& ranks, const RankFacts& facts);
// Compares all ranks of a mesh, numbered as in its world.
std::string difference_of(const Mesh& mesh, const RankFacts& facts);

// The texts of all ranks, in rank order. Every rank calls it and has them before one of them
// returns.
std::vector<std::string> texts_of_ranks(Communicator& ranks, const std::string& mine);
std::vector<std::string> texts_of_ranks(const Mesh& mesh, const std::string& mine);

// The fields of options by their names, but for those that may differ between ranks.
template <typename Options>
RankFacts option_facts(Options options) {
  RankFacts facts;
  visit_fields(options, [&](const OptionField& field, const auto& value, const auto&) {
    if (!field.may_differ) facts.emplace_back(field.name, join(option_texts(value), ", "));
  });
  return facts;
}

// A process tells this to the others before all of them choose.
struct RankPlace {
  std::string host;  // this_host()
  std::string gpu;   // the PCI bus id of the GPU that it computes on; "" where it sees none
  bool has_nccl = false;
  NcclUse nccl = NcclUse::kAuto;
  int sum_group = 0;  // CommOptions::sum_group

  bool operator==(const RankPlace&) const = default;
};

// The places of all ranks, in rank order. Every rank calls it.
std::vector<RankPlace> places_of_ranks(Communicator& ranks, const RankPlace& mine);

// Equal for processes of one host alone, and what NCCL takes for a host: NCCL_HOSTID, or else the
// host's name and the id of its boot.
std::string this_host();

struct Transport {
  bool by_nccl = false;
  int sum_group = 1;  // Communicator::sum_group of all ranks
  // "tensors travel by NCCL: 8 ranks on 2 hosts, each with a GPU of its own"
  std::string sentence = {};
  std::string error = {};  // what the ranks have set that contradicts itself; "" for nothing
};

// The choice of all ranks, whose places are in rank order: every rank comes to the same. NCCL takes
// one process for each physical GPU of a host, so `auto` is NCCL where each rank has a GPU that no
// other rank of its host computes on, however many GPUs it sees. Otherwise `carrier` ("TCP", "MPI")
// carries tensors.
Transport choose_transport(std::span<const RankPlace> ranks, const std::string& carrier);

// How many ranks compute on the GPU of `rank`; 0 where it has none.
int ranks_on_gpu_of(int rank, std::span<const RankPlace> ranks);

}  // namespace fsdp
