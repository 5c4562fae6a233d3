#include "fsdp/comm/stream_mark.h"

#include <ATen/ATen.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>

namespace fsdp {

namespace {

using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

constexpr unsigned kCudaVersion = 12000;  // whose form of the call is meant

// The driver's; nullptr if it has none.
WriteValue find_write_value() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuStreamWriteValue32", &found, kCudaVersion, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuStreamWriteValue32", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<WriteValue>(found);
}

}  // namespace

bool StreamMark::is_reached() const {
  if (event_ != nullptr) return event_->query();
  const uint32_t reached = std::atomic_ref(*const_cast<uint32_t*>(reached_)).load();
  return static_cast<int32_t>(reached - number_) >= 0;  // numbers begin again after the last one
}

StreamMarks::StreamMarks()
    : reached_(at::zeros({1}, at::device(at::kCPU).dtype(at::kInt).pinned_memory(true))) {}

StreamMark StreamMarks::next(const c10::cuda::CUDAStream& stream) {
  static const WriteValue write_value = find_write_value();
  auto* reached = reinterpret_cast<uint32_t*>(reached_.mutable_data_ptr<int32_t>());
  if (write_value != nullptr &&
      write_value(stream.stream(), reinterpret_cast<CUdeviceptr>(reached), ++number_,
                  CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS)
    return {reached, number_};
  auto event = std::make_shared<c10::Event>(at::kCUDA);
  event->record(stream);
  return StreamMark(std::move(event));
}

}  // namespace fsdp
