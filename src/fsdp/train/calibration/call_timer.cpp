#include "fsdp/train/calibration/call_timer.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "fsdp/graph/device_graph.h"

namespace fsdp::train {

namespace {

constexpr int kTurns = 3;
constexpr double kMostCalls = 20;  // of a turn
constexpr int kFewestCalls = 3;    // on a CPU

c10::Stream recorded_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return device.is_cpu() ? guard.getStream(device) : guard.getStreamFromGlobalPool(device);
}

std::unique_ptr<DeviceGraph> recorded(c10::Device device, const std::function<void()>& calls) {
  std::unique_ptr<DeviceGraph> graph = make_device_graph(device);
  graph->begin({});
  try {
    calls();
  } catch (...) {
    graph->cancel();
    throw;
  }
  graph->end();
  return graph;
}

}  // namespace

void synchronize(c10::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

CallTimer::CallTimer(c10::Device device, double seconds)
    : device_(device), seconds_(seconds), stream_(recorded_stream(device)) {}

double CallTimer::us_on_cpu(const std::function<void()>& call) const {
  using Clock = std::chrono::steady_clock;
  call();
  double best = 0.0;
  const auto begin = Clock::now();
  for (int i = 0;
       i < kFewestCalls || std::chrono::duration<double>(Clock::now() - begin).count() < seconds_;
       ++i) {
    const auto start = Clock::now();
    call();
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    best = i == 0 ? us : std::min(best, us);
  }
  return best;
}

double CallTimer::us_between_events(const std::function<void()>& run) const {
  c10::Event begin(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // one that takes time
  c10::Event end(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream_);
  run();
  end.record(stream_);
  synchronize(device_);
  return begin.elapsedTime(end) * 1e3;
}

double CallTimer::us(const std::function<std::function<void()>()>& prepare) const {
  const c10::StreamGuard on_stream(stream_);
  const std::function<void()> call = prepare();
  if (device_.is_cpu()) return us_on_cpu(call);
  call();  // libraries choose their algorithms
  synchronize(device_);
  const double once = us_between_events(call);
  const int calls = static_cast<int>(std::clamp(seconds_ * 1e6 / once, 1.0, kMostCalls));
  const std::unique_ptr<DeviceGraph> turn = recorded(device_, [&] {
    for (int i = 0; i < calls; ++i) call();
  });
  turn->replay();
  std::vector<double> times;
  for (int i = 0; i < kTurns; ++i) times.push_back(us_between_events([&] { turn->replay(); }));
  std::sort(times.begin(), times.end());
  return times[kTurns / 2] / calls;
}

std::function<void()> forward_call(const TensorFunction& function,
                                   const std::vector<at::Tensor>& inputs) {
  return [=] {
    const at::NoGradGuard no_grad;
    function(inputs);
  };
}

std::function<void()> backward_call(const TensorFunction& function,
                                    const std::vector<at::Tensor>& inputs,
                                    const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().set_requires_grad(true));
  const std::vector<at::Tensor> outputs = function(leaves);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& output : outputs) gradients.push_back(at::ones_like(output));
  leaves.insert(leaves.end(), parameters.begin(), parameters.end());
  return [=] { torch::autograd::grad(outputs, leaves, gradients, /*retain_graph=*/true); };
}

}  // namespace fsdp::train
