// The part of the communicator suite about tensors that their owner drops early.
#pragma once

#include "support/communicator_suite.h"

namespace fsdp::testing {

CommunicatorCase dropped_tensors_case();

}  // namespace fsdp::testing
