#include "fsdp/comm/comm_options.h"

#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"

namespace fsdp {

void CommOptions::validate() const {
  FSDP_CHECK(timeout_seconds > 0, "timeout_seconds is ", timeout_seconds, ": it must be above 0");
  FSDP_CHECK(bandwidth_bytes_per_s >= 0, "bandwidth_bytes_per_s is ", bandwidth_bytes_per_s,
             ": it must be 0 (no limit) or above");
}

CommOptions CommOptions::from_environment() {
  static const std::vector<std::string> kOffOn = {"0", "1"};
  CommOptions options;
  options.timeout_seconds = env_seconds("FSDP_TIMEOUT_S", options.timeout_seconds);
  options.checked = env_choice("FSDP_CHECKED", kOffOn, options.checked ? 1 : 0) == 1;
  options.bandwidth_bytes_per_s =
      env_bytes_per_second("FSDP_BANDWIDTH", options.bandwidth_bytes_per_s);
  static const std::vector<std::string> kNcclUses = {"auto", "off", "always"};
  static const std::vector<std::string> kNcclReduces = {"exact", "native"};
  options.nccl = static_cast<NcclUse>(env_choice("FSDP_NCCL", kNcclUses, 0));
  options.nccl_reduce = static_cast<NcclReduce>(env_choice("FSDP_NCCL_REDUCE", kNcclReduces, 0));
  return options;
}

const char* name_of(UserBuffers use) {
  switch (use) {
    case UserBuffers::kOff:
      return "off";
    case UserBuffers::kRegistered:
      return "registered";
    case UserBuffers::kSymmetric:
      return "symmetric";
  }
  return "unknown";
}

}  // namespace fsdp
