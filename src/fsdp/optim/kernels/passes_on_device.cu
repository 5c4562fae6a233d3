// The sum of squares on a CUDA device.
#include "fsdp/base/check.h"
#include "fsdp/base/exact_sum.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/narrow_float.h"
#include "fsdp/optim/kernels/update_kernels.h"

namespace fsdp {

namespace {

constexpr int kThreads = 256;
constexpr int kSumBlocks = 1024;  // the same on every device: the order of the sum is fixed

__device__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ int64_t num_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Sums the values of a block's threads, in the first thread; halves are added in fixed order.
__device__ double block_sum(double value) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

// Numbers that are loaded at once.
template <typename Narrow>
struct alignas(16) Codes {
  static constexpr int kCount = 16 / sizeof(typename Narrow::Code);
  typename Narrow::Code of[kCount];
};

template <typename Narrow>
__global__ void __launch_bounds__(kThreads)
    partial_sums_kernel(const void* values, int64_t numel, double* partial) {
  constexpr int kCount = Codes<Narrow>::kCount;
  const auto* from = static_cast<const typename Narrow::Code*>(values);
  double sum = 0.0;
  const auto add = [&](typename Narrow::Code code) {
    const double value = Narrow::widened(code);
    sum += value * value;
  };
  // The numbers before the first aligned address, and the last ones, go one by one.
  const auto misaligned =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(from) % 16 / sizeof(*from));
  const int64_t head = misaligned == 0 ? 0 : min(numel, static_cast<int64_t>(kCount) - misaligned);
  const int64_t num_wide = (numel - head) / kCount;
  if (thread_index() < head) add(from[thread_index()]);
  const auto* wide = reinterpret_cast<const Codes<Narrow>*>(from + head);
  for (int64_t i = thread_index(); i < num_wide; i += num_threads()) {
    const Codes<Narrow> codes = wide[i];
#pragma unroll
    for (int k = 0; k < kCount; ++k) add(codes.of[k]);
  }
  const int64_t rest = head + num_wide * kCount + thread_index();
  if (rest < numel) add(from[rest]);
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    add_partial_sums_kernel(const double* partial, double* sum) {
  double mine = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < kSumBlocks; i += kThreads) mine += partial[i];
  mine = block_sum(mine);
  if (threadIdx.x == 0) *sum += mine;
}

// A warp for each block of numbers; digits of a thread block are added in shared memory first.
template <typename Narrow>
__global__ void __launch_bounds__(kThreads)
    exact_squares_kernel(const void* values, int64_t numel, int64_t* digits) {
  constexpr int kWarp = 32;
  constexpr int64_t kOfThread = kExactBlock / kWarp;
  __shared__ unsigned long long sums[ExactSum::kCount];
  if (threadIdx.x < ExactSum::kCount) sums[threadIdx.x] = 0;
  __syncthreads();
  const auto* from = static_cast<const typename Narrow::Code*>(values);
  const int64_t lane = threadIdx.x % kWarp;
  // All threads of a warp are here or none.
  for (int64_t block = thread_index() / kWarp; block * kExactBlock < numel;
       block += num_threads() / kWarp) {
    double sum = 0.0;
    for (int64_t k = 0; k < kOfThread; ++k) {
      const int64_t at = block * kExactBlock + k * kWarp + lane;
      const double value = at < numel ? Narrow::widened(from[at]) : 0.0;
      sum += value * value;
    }
    for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, half);
    if (lane == 0)
      ExactSum::place(sum, [](int digit, int64_t amount) {
        atomicAdd(&sums[digit], static_cast<unsigned long long>(amount));
      });
  }
  __syncthreads();
  if (threadIdx.x < ExactSum::kCount && sums[threadIdx.x] != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(digits) + threadIdx.x, sums[threadIdx.x]);
}

// Calls launch(Fp32()) or the like.
template <typename Launch>
void with_type(DType dtype, const Launch& launch) {
  FSDP_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16,
             "a squared sum of ", name_of(dtype), " was asked for: use fp32, bf16 or fp16");
  if (dtype == DType::kFloat32) launch(Fp32());
  if (dtype == DType::kBFloat16) launch(Bf16());
  if (dtype == DType::kFloat16) launch(Fp16());
}

}  // namespace

int64_t squared_sum_workspace_numel() { return kSumBlocks; }

void squared_sum_on_device(const void* values, DType dtype, int64_t numel, double* sum,
                           double* workspace, void* stream) {
  if (numel == 0) return;
  with_type(dtype, [&](auto type) {
    partial_sums_kernel<decltype(type)>
        <<<kSumBlocks, kThreads, 0, cuda_stream(stream)>>>(values, numel, workspace);
  });
  add_partial_sums_kernel<<<1, kThreads, 0, cuda_stream(stream)>>>(workspace, sum);
  check_launch("squared_sum");
}

void add_exact_squares_on_device(const void* values, DType dtype, int64_t numel, int64_t* digits,
                                 void* stream) {
  if (numel == 0) return;
  with_type(dtype, [&](auto type) {
    exact_squares_kernel<decltype(type)>
        <<<kSumBlocks, kThreads, 0, cuda_stream(stream)>>>(values, numel, digits);
  });
  check_launch("exact_squares");
}

}  // namespace fsdp
