// The sum of all ranks' values as a CUDA kernel. Every input is read once and the output written
// once. Compiled with -fmad=false: the same bits as on the host.
#include <cstdint>

#include "fsdp/base/error.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/narrow_float.h"
#include "fsdp/comm/sum_on_device.h"

namespace fsdp {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
// Whatever the device, as the order of the squares' sum is fixed; and many more than run at once,
// so that the last ones leave nothing idle.
constexpr int kMaxBlocks = 16384;
constexpr int kVector = 8;  // elements a thread takes at once: 16 bytes of bf16
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Workspace {
  double partial[kMaxBlocks];  // squares, by block
  unsigned arrived;            // blocks that have stored theirs
};

template <typename Narrow, int kCount>
struct alignas(kCount == 1 ? sizeof(typename Narrow::Code) : 16) Codes {
  typename Narrow::Code code[kCount];
};

template <int kCount>
struct Numbers {
  float of[kCount];
};

template <typename Narrow, int kCount>
__device__ Codes<Narrow, kCount> load(const void* values, int64_t index) {
  return *reinterpret_cast<const Codes<Narrow, kCount>*>(
      static_cast<const typename Narrow::Code*>(values) + index);
}

template <typename Narrow, int kCount>
__device__ Numbers<kCount> widened(const Codes<Narrow, kCount>& codes) {
  Numbers<kCount> numbers;
#pragma unroll
  for (int k = 0; k < kCount; ++k) numbers.of[k] = Narrow::widened(codes.code[k]);
  return numbers;
}

template <typename Narrow>
__device__ typename Narrow::Code rounded(float value) {
  return Narrow::nearest(value);
}
template <>
__device__ float rounded<Fp32>(float value) {
  return value;
}

__device__ const void* input_of(const DeviceSum& sum, int rank) {
  return sum.first == nullptr ? sum.listed[rank]
                              : static_cast<const char*>(sum.first) + rank * sum.stride_bytes;
}

// What a thread has seen of the values it stored.
struct Seen {
  double squares = 0.0;
  bool nonfinite = false;
};

template <typename Wire, typename Result, int kCount>
__device__ void sum_at(const DeviceSum& sum, int64_t index, Seen& seen) {
  Numbers<kCount> total = widened(load<Wire, kCount>(input_of(sum, 0), index));
  for (int rank = 1; rank < sum.num_ranks; ++rank) {
    const Numbers<kCount> next = widened(load<Wire, kCount>(input_of(sum, rank), index));
#pragma unroll
    for (int k = 0; k < kCount; ++k) total.of[k] += next.of[k];
  }
  auto* place = reinterpret_cast<Codes<Result, kCount>*>(
      static_cast<typename Result::Code*>(sum.output) + index);
  Numbers<kCount> before = {};
  if (sum.adds) before = widened(*place);
  Codes<Result, kCount> stored;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    float value = total.of[k] * sum.scale;
    if (sum.adds) value = before.of[k] + value;
    stored.code[k] = rounded<Result>(value);
    const float exact = Result::widened(stored.code[k]);
    seen.squares += static_cast<double>(exact) * exact;
    seen.nonfinite |= !(exact - exact == 0.0f);
  }
  *place = stored;
}

// In the first thread; in an order that depends on nothing.
__device__ double block_sum(double value) {
  __shared__ double warps[kThreads / kWarp];
  for (int half = kWarp / 2; half > 0; half /= 2) value += __shfl_down_sync(kAllLanes, value, half);
  __syncthreads();  // until here others may read the last sum's
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0.0;
  for (double each : warps) sum += each;
  return sum;
}

// The last block to come adds up what all have stored.
__device__ void add_squares(const DeviceSum& sum, double mine) {
  __shared__ bool is_last;
  auto* workspace = static_cast<Workspace*>(sum.workspace);
  const double of_block = block_sum(mine);
  if (threadIdx.x == 0) {
    workspace->partial[blockIdx.x] = of_block;
    __threadfence();
    is_last = atomicAdd(&workspace->arrived, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!is_last) return;
  double partial = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(gridDim.x); i += kThreads)
    partial += __ldcg(&workspace->partial[i]);  // past this multiprocessor's own cache
  const double total = block_sum(partial);
  if (threadIdx.x != 0) return;
  *sum.squares += total;
  workspace->arrived = 0;
}

template <typename Wire, typename Result, int kCount>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ DeviceSum sum) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t num_vectors = sum.numel / kCount;
  Seen seen;
  for (int64_t i = thread; i < num_vectors; i += num_threads)
    sum_at<Wire, Result, kCount>(sum, i * kCount, seen);
  // What is left over is less than a vector.
  const int64_t rest = num_vectors * kCount + thread;
  if (kCount > 1 && rest < sum.numel) sum_at<Wire, Result, 1>(sum, rest, seen);
  if (sum.nonfinite != nullptr && seen.nonfinite) *sum.nonfinite = 1.0f;  // all store the same
  if (sum.squares != nullptr) add_squares(sum, seen.squares);
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

bool is_aligned(const DeviceSum& sum) {
  bool aligned = is_aligned(sum.output);
  if (sum.first != nullptr)
    return aligned && is_aligned(sum.first) && (sum.num_ranks == 1 || sum.stride_bytes % 16 == 0);
  for (int rank = 0; rank < sum.num_ranks; ++rank) aligned &= is_aligned(sum.listed[rank]);
  return aligned;
}

template <typename Wire, typename Result>
void launch(const DeviceSum& sum, cudaStream_t stream) {
  const bool wide = is_aligned(sum);
  const int64_t per_block = kThreads * (wide ? kVector : 1);
  const int64_t wanted = (sum.numel + per_block - 1) / per_block;
  const auto blocks = static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
  if (wide) {
    sum_kernel<Wire, Result, kVector><<<blocks, kThreads, 0, stream>>>(sum);
  } else {
    sum_kernel<Wire, Result, 1><<<blocks, kThreads, 0, stream>>>(sum);
  }
}

template <typename Wire>
void launch_to(const DeviceSum& sum, cudaStream_t stream) {
  if (sum.result == DType::kFloat32) launch<Wire, Fp32>(sum, stream);
  if (sum.result == DType::kBFloat16) launch<Wire, Bf16>(sum, stream);
  if (sum.result == DType::kFloat16) launch<Wire, Fp16>(sum, stream);
}

}  // namespace

bool has_device_sums() { return true; }

bool is_summed_on_device(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

int64_t device_sum_workspace_bytes() { return sizeof(Workspace); }

void sum_on_device(const DeviceSum& sum, void* stream) {
  if (sum.numel == 0) return;
  FSDP_CHECK(is_summed_on_device(sum.wire) && is_summed_on_device(sum.result), "a sum of ",
             name_of(sum.wire), " into ", name_of(sum.result),
             " on a device was asked for: use fp32, bf16 or fp16");
  FSDP_ASSERT(sum.first != nullptr || sum.num_ranks <= DeviceSum::kMaxListed);
  FSDP_ASSERT(sum.squares == nullptr || sum.workspace != nullptr);
  if (sum.wire == DType::kFloat32) launch_to<Fp32>(sum, cuda_stream(stream));
  if (sum.wire == DType::kBFloat16) launch_to<Bf16>(sum, cuda_stream(stream));
  if (sum.wire == DType::kFloat16) launch_to<Fp16>(sum, cuda_stream(stream));
  check_launch("sum_on_device");
}

}  // namespace fsdp
