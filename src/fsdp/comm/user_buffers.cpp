#include "fsdp/comm/user_buffers.h"

namespace fsdp {

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
