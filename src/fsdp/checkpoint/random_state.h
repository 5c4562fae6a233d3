// The random numbers that will come: the states of a process's generators as bytes.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace fsdp {

// Of libtorch's default generators for the CPU and, if it is another, for `device`.
std::string random_state(c10::Device device);

// Error where the bytes are no such states.
void set_random_state(const std::string& state, c10::Device device);

}  // namespace fsdp
