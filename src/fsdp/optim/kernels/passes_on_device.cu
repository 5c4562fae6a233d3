// The other passes of a step on a CUDA device: sums of squares, and halves of weights.
#include "fsdp/base/check.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/narrow_float.h"
#include "fsdp/optim/kernels/split_weight.h"
#include "fsdp/optim/kernels/update_on_device.h"

namespace fsdp {

namespace {

constexpr int kThreads = 256;
constexpr int kSumBlocks = 1024;   // the same on every device: the order of the sum is fixed
constexpr int kMaxBlocks = 16384;  // many more than run at once: the last ones leave nothing idle

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

// Neighbours that a thread of the passes below moves at once, if all arrays are aligned for it.
constexpr int kVector = 4;
template <typename Word, int kCount>
struct alignas(kCount * sizeof(Word)) Vector {
  Word of[kCount];
};
template <typename Word, int kCount>
__device__ const Vector<Word, kCount>& vector_of(const Word* values, int64_t index) {
  return reinterpret_cast<const Vector<Word, kCount>*>(values)[index];
}
template <typename Word, int kCount>
__device__ Vector<Word, kCount>& vector_of(Word* values, int64_t index) {
  return reinterpret_cast<Vector<Word, kCount>*>(values)[index];
}

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const uint16_t* upper, const int16_t* remainder, float* joined, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += num_threads()) {
    const Vector<uint16_t, kCount> uppers = vector_of<uint16_t, kCount>(upper, i);
    const Vector<int16_t, kCount> remainders = vector_of<int16_t, kCount>(remainder, i);
    Vector<float, kCount> values;
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      values.of[k] = join_weight({.upper = uppers.of[k], .remainder = remainders.of[k]});
    vector_of<float, kCount>(joined, i) = values;
  }
}

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* joined, uint16_t* upper, int16_t* remainder, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += num_threads()) {
    const Vector<float, kCount> values = vector_of<float, kCount>(joined, i);
    Vector<uint16_t, kCount> uppers;
    Vector<int16_t, kCount> remainders;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const SplitWeight split = split_weight(values.of[k]);
      uppers.of[k] = split.upper;
      remainders.of[k] = split.remainder;
    }
    vector_of<uint16_t, kCount>(upper, i) = uppers;
    vector_of<int16_t, kCount>(remainder, i) = remainders;
  }
}

// How many first elements of three arrays can go as vectors; the others go one by one.
int64_t numel_in_vectors(const void* halves, const void* remainder, const float* joined,
                         int64_t numel) {
  const auto is_aligned = [](const void* address, size_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % (kVector * bytes) == 0;
  };
  return is_aligned(halves, 2) && is_aligned(remainder, 2) && is_aligned(joined, 4)
             ? numel / kVector * kVector
             : 0;
}

int blocks_for(int64_t numel) {
  const int64_t blocks = (numel + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

}  // namespace

int64_t squared_sum_workspace_numel() { return kSumBlocks; }

void squared_sum_on_device(const void* values, DType dtype, int64_t numel, double* sum,
                           double* workspace, void* stream) {
  if (numel == 0) return;
  const auto launch = [&](auto kernel) {
    kernel<<<kSumBlocks, kThreads, 0, cuda_stream(stream)>>>(values, numel, workspace);
  };
  FSDP_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16,
             "a squared sum of ", name_of(dtype), " was asked for: use fp32, bf16 or fp16");
  if (dtype == DType::kFloat32) launch(partial_sums_kernel<Fp32>);
  if (dtype == DType::kBFloat16) launch(partial_sums_kernel<Bf16>);
  if (dtype == DType::kFloat16) launch(partial_sums_kernel<Fp16>);
  add_partial_sums_kernel<<<1, kThreads, 0, cuda_stream(stream)>>>(workspace, sum);
  check_launch("squared_sum");
}

void join_weights_on_device(const void* weight, const int16_t* remainder, float* joined,
                            int64_t numel, void* stream) {
  const auto* upper = static_cast<const uint16_t*>(weight);
  const int64_t wide = numel_in_vectors(weight, remainder, joined, numel);
  if (wide > 0)
    join_kernel<kVector><<<blocks_for(wide / kVector), kThreads, 0, cuda_stream(stream)>>>(
        upper, remainder, joined, wide / kVector);
  if (numel > wide)
    join_kernel<1><<<blocks_for(numel - wide), kThreads, 0, cuda_stream(stream)>>>(
        upper + wide, remainder + wide, joined + wide, numel - wide);
  check_launch("join_weights");
}

void split_weights_on_device(const float* joined, void* weight, int16_t* remainder, int64_t numel,
                             void* stream) {
  auto* upper = static_cast<uint16_t*>(weight);
  const int64_t wide = numel_in_vectors(weight, remainder, joined, numel);
  if (wide > 0)
    split_kernel<kVector><<<blocks_for(wide / kVector), kThreads, 0, cuda_stream(stream)>>>(
        joined, upper, remainder, wide / kVector);
  if (numel > wide)
    split_kernel<1><<<blocks_for(numel - wide), kThreads, 0, cuda_stream(stream)>>>(
        joined + wide, upper + wide, remainder + wide, numel - wide);
  check_launch("split_weights");
}

}  // namespace fsdp
