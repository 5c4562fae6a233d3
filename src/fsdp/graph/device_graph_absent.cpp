// Builds without CUDA record nothing.
#include "fsdp/base/check.h"
#include "fsdp/graph/device_graph.h"

namespace fsdp {

std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device) {
  throw UsageError(concat("a graph of steps on ", device.str(),
                          " was asked for, but this build has no CUDA; build with the preset "
                          "'cuda', or run the steps as they are"));
}

}  // namespace fsdp
