// The part of the communicator suite that is about tensors that their owner lets go of early.
#pragma once

#include "support/communicator_suite.h"

namespace fsdp::testing {

CommunicatorCase dropped_tensors_case();

}  // namespace fsdp::testing
