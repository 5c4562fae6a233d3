// The claims every backend must meet: one list of cases, run on threads, MPI and devices alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>

#include "fsdp/comm/world.h"

namespace fsdp::testing {

struct CommunicatorCase {
  std::string name;  // a claim, as in TEST(Suite, Claim)
  std::function<void(World&, at::Device)> body;
};

// Every case leaves the world usable for the next one.
std::span<const CommunicatorCase> communicator_cases();

// The bytes of a fixed series of collectives on `world`, as one number: equal on every rank, and
// equal for every backend with the same number of ranks.
uint64_t communicator_digest(World& world);

}  // namespace fsdp::testing
