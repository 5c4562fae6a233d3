// Which cases of the parity suite run: all of them, or a few that cover every pair of values.
#pragma once

#include <vector>

#include "support/parity.h"

namespace fsdp::testing {

// Every combination of strategy, mesh, pool, microbatches, precision, gradient lifetime, loss and
// model.
std::vector<ParityCase> all_cases();

// A subset: for any two of those properties, every pair of their values occurs in one case at
// least. Defects that need one or two properties to meet show up in it.
std::vector<ParityCase> pairwise_cases();

// all_cases() when the environment variable FSDP_FULL is 1 (`make test-full` sets it).
std::vector<ParityCase> cases_to_run();

}  // namespace fsdp::testing
