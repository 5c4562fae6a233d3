// How the tensors of a job travel between its processes: by NCCL, or through host memory.
#pragma once

#include <span>
#include <string>

#include "fsdp/comm/comm_options.h"

namespace fsdp {

// What a process tells the others before all of them choose.
struct RankPlace {
  std::string host;  // this_host()
  std::string gpu;   // the PCI bus id of the GPU that it computes on; "" where it sees none
  bool has_nccl = false;
  NcclUse nccl = NcclUse::kAuto;

  bool operator==(const RankPlace&) const = default;
};

// As text for the wire, and back.
std::string text_of(const RankPlace& place);
RankPlace place_in(const std::string& text);

// Equal for processes of one host alone, and what NCCL takes for a host: NCCL_HOSTID, or else the
// host's name and the id of its boot.
std::string this_host();

struct Transport {
  bool by_nccl = false;
  std::string why = {};    // "8 ranks on 2 hosts, each with a GPU of its own"
  std::string error = {};  // what the ranks have set that contradicts itself; "" for nothing
};

// The choice of all ranks, whose places are in rank order: every rank comes to the same. NCCL takes
// one process for each physical GPU of a host, so `auto` is NCCL where each rank has a GPU that no
// other rank of its host computes on, however many GPUs it sees.
Transport choose_transport(std::span<const RankPlace> ranks);

// How many ranks compute on the GPU of `rank`; 0 where it has none.
int ranks_on_gpu_of(int rank, std::span<const RankPlace> ranks);

// "tensors travel by NCCL: 8 ranks on 2 hosts, each with a GPU of its own"; `carrier` ("TCP",
// "MPI") is what carries tensors otherwise.
std::string sentence_of(const Transport& transport, const std::string& carrier);

}  // namespace fsdp
