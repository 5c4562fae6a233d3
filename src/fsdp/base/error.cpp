#include "fsdp/base/error.h"

namespace fsdp {

void throw_internal_error(const char* file, int line, const char* condition,
                          const std::string& message) {
  throw InternalError(concat("internal error at ", file, ":", line, ": ", condition,
                             message.empty() ? "" : ": ", message));
}

}  // namespace fsdp
