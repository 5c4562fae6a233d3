#include "fsdp/comm/comm_options.h"

#include <string>
#include <vector>

#include "fsdp/base/env.h"

namespace fsdp {

CommOptions CommOptions::from_environment() {
  static const std::vector<std::string> kOffOn = {"0", "1"};
  CommOptions options;
  options.timeout_seconds = env_seconds("FSDP_TIMEOUT_S", options.timeout_seconds);
  options.checked = env_choice("FSDP_CHECKED", kOffOn, options.checked ? 1 : 0) == 1;
  return options;
}

}  // namespace fsdp
