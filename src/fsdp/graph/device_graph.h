// Work that a device records from one stream and replays as one launch.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <memory>
#include <vector>

namespace fsdp {

// One recording. Memory that is allocated while it is made belongs to it, at fixed addresses, until
// it goes.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  // Records what the current stream, which is not the default one, and streams that wait for it are
  // given until end(); nothing of it runs. Random numbers of the device's default generator and of
  // `generators` go on from replay to replay.
  virtual void begin(const std::vector<at::Generator>& generators) = 0;
  virtual void end() = 0;
  // Instead of end(), after an error.
  virtual void cancel() noexcept = 0;

  // On the current stream.
  virtual void replay() = 0;

 protected:
  DeviceGraph() = default;
};

// A UsageError where this build or the device cannot record.
std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device);

}  // namespace fsdp
