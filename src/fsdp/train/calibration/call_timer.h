// The time of a call on a device, without the host's part of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace fsdp::train {

class CallTimer {
 public:
  // `seconds` is about what one measurement may take; short ones call again and again.
  CallTimer(c10::Device device, double seconds);

  // Microseconds of one call, which is prepared on the stream that it runs on: autograd runs a
  // backward where its forward ran. On a GPU calls are recorded, so that they follow each other
  // without gaps, and the median of a few turns counts; on a CPU the fastest call, since whatever
  // else the machine does can only make it slower.
  double us(const std::function<std::function<void()>()>& prepare) const;

 private:
  double us_on_cpu(const std::function<void()>& call) const;
  // Of one run between two events of the stream.
  double us_between_events(const std::function<void()>& run) const;

  const c10::Device device_;
  const double seconds_;
  const c10::Stream stream_;  // one that can be recorded
};

// Until the device has done what it was asked for.
void synchronize(c10::Device device);

// --- layers as calls -----------------------------------------------------------------------------

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Without gradients.
std::function<void()> forward_call(const TensorFunction& function,
                                   const std::vector<at::Tensor>& inputs);

// The gradients of all inputs and of the function's own parameters, of a forward that ran once.
std::function<void()> backward_call(const TensorFunction& function,
                                    const std::vector<at::Tensor>& inputs,
                                    const std::vector<at::Tensor>& parameters = {});

}  // namespace fsdp::train
