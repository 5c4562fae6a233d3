// Recordings of a CUDA device, by libtorch's own wrapper: its allocator and its random numbers know
// about them.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/graph/device_graph.h"

namespace fsdp {

namespace {

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(c10::Device device) : device_(device) {}

  void begin(const std::vector<at::Generator>& generators) override {
    const c10::cuda::CUDAGuard guard(device_);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    // Leftovers of eager steps cannot become part of the recording's memory.
    c10::cuda::CUDACachingAllocator::emptyCache();
    for (const at::Generator& generator : generators) graph_.register_generator_state(generator);
    // Threads that do not record (another rank, a loader) may call what they like.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  }

  void end() override { graph_.capture_end(); }

  void cancel() noexcept override {
    try {
      graph_.capture_end();
    } catch (const std::exception& error) {
      log(LogLevel::kDebug, "a recording that was given up: ", error.what());
    }
    // The recording has reported this error; it must not surface again at a later call.
    (void)cudaGetLastError();
  }

  void replay() override { graph_.replay(); }

 private:
  const c10::Device device_;
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device) {
  if (!device.is_cuda())
    throw UsageError(concat("a graph of steps on ", device.str(),
                            " was asked for; only CUDA devices record graphs"));
  return std::make_unique<CudaGraph>(device);
}

}  // namespace fsdp
