// The device of models and batches in tests that hold on every device: FSDP_TEST_DEVICE, or the
// CPU.
#pragma once

#include <c10/core/Device.h>

#include <cstdlib>

namespace fsdp::testing {

inline c10::Device test_device() {
  const char* name = std::getenv("FSDP_TEST_DEVICE");
  return c10::Device(name == nullptr ? "cpu" : name);
}

}  // namespace fsdp::testing
