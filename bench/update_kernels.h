// How much of a device's memory bandwidth the kernels of gradients, updates and weights use.
#pragma once

#include <c10/core/Device.h>

namespace bench {

// Prints a row per kernel: time, bytes moved per second, and that as a part of a copy's.
void compare_kernels(c10::Device device, int rounds);

}  // namespace bench
