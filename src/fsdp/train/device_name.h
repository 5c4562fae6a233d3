// What a device is called by its driver.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace fsdp::train {

// "NVIDIA H200"; "" for CPUs, and where the driver does not say.
std::string device_name(c10::Device device);

}  // namespace fsdp::train
