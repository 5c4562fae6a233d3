// The settings that all communicators share, and how far a backend uses its callers' memory in
// place.
#pragma once

#include <cstdint>

namespace fsdp {

// When tensors on GPUs travel by NCCL.
enum class NcclUse {
  kAuto,    // when this build has NCCL and no two processes compute on one GPU
  kOff,     // never: processes stage device tensors through host memory
  kAlways,  // by all means, with one process, too
};

// "auto", "off", "always"
const char* name_of(NcclUse use);

// How NCCL adds gradients.
enum class NcclReduce {
  kExact,   // contributions travel as they are and are added in one order in fp32 or wider: the
            // same bits in every run and with every backend
  kNative,  // NCCL's own reduce-scatter, in the wire type and in an order of its choice
};

struct CommOptions {
  // How long any wait for other ranks may take before it is an error that says who is missing.
  // Environment: FSDP_TIMEOUT_S.
  double timeout_seconds = 600.0;
  // The setting that this error says to raise: where a program has a setting of its own, its name.
  const char* timeout_name = "FSDP_TIMEOUT_S";

  // Ranks compare what they are about to do (sequence, operation, dtype, bytes, tag) before data
  // moves. `threads` always does, since there it costs nothing; `mpi` and `tcp` pay one small
  // message per rank and operation. Environment: FSDP_CHECKED=1.
  bool checked = false;

  // A collective on CPU tensors lasts at least as long as the bytes this rank receives take at this
  // rate; its worker sleeps meanwhile. 0: no limit. For measuring overlap on a machine without a
  // network. Environment: FSDP_BANDWIDTH, in bytes per second or as "1.25GB".
  double bandwidth_bytes_per_s = 0;

  // Gradients of so many neighbouring ranks are added first, then the sums of such groups
  // (SumOrder, comm/reduce/sum_order.h): the bits depend on it. 0: the ranks of a host, so that a
  // network carries one sum per host; threads of a process are one host. Divides the number of
  // ranks; the same on all. Environment: FSDP_SUM_GROUP.
  int sum_group = 0;

  // Environment: FSDP_NCCL=auto|off|always and FSDP_NCCL_REDUCE=exact|native.
  NcclUse nccl = NcclUse::kAuto;
  NcclReduce nccl_reduce = NcclReduce::kExact;

  // An Error that names the field, its value and what is allowed.
  void validate() const;

  // The defaults above, overridden by the environment.
  static CommOptions from_environment();
};

// Whether a backend uses the memory of its callers in place, without copies through its own; from
// worst to best.
enum class UserBuffers : uint8_t {
  kOff,         // what is sent and received is copied through the backend's memory
  kRegistered,  // the backend knows the memory and may let the network or other GPUs use it
  kSymmetric,   // every rank knows where the others' is, for kernels that read and write there
};

// "off", "registered", "symmetric"
const char* name_of(UserBuffers use);

}  // namespace fsdp
