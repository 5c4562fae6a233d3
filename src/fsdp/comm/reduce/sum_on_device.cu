// The sum of all ranks' values as a CUDA kernel. Every input is read once and the output written
// once. Compiled with -fmad=false: the same bits as on the host.
#include <cstdint>

#include "fsdp/base/check.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/narrow_float.h"
#include "fsdp/comm/reduce/sum_on_device.h"

namespace fsdp {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
// Whatever the device, as the order of the squares' sum is fixed; more than run at once, so that
// the last ones leave little idle, and few enough for one block to add up what they found.
constexpr int kMaxBlocks = 8192;
// Neighbours that a thread moves at once: 16 bytes of fp32. With more of them its stores of fp32
// would be two, each to half of every sector that the warp touches.
constexpr int kVector = 4;
// Vectors of a thread, so that more loads are in flight; as many as partial sums of so many levels
// leave registers for.
constexpr int vectors_at_once(int levels) { return levels <= 3 ? 4 : levels <= 4 ? 2 : 1; }
constexpr int kRanksAtOnce = 2;  // likewise: loaded before the first is added
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Workspace {
  double partial[kMaxBlocks];  // squares, by block
  unsigned arrived;            // blocks that have stored theirs
};

template <typename Narrow, int kCount>
struct alignas(kCount * sizeof(typename Narrow::Code)) Codes {
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
__device__ void store(void* values, int64_t index, const Codes<Narrow, kCount>& codes) {
  *reinterpret_cast<Codes<Narrow, kCount>*>(static_cast<typename Narrow::Code*>(values) + index) =
      codes;
}

template <typename Narrow, int kCount>
__device__ Numbers<kCount> widened(const Codes<Narrow, kCount>& codes) {
  Numbers<kCount> numbers;
#pragma unroll
  for (int k = 0; k < kCount; ++k) numbers.of[k] = Narrow::widened(codes.code[k]);
  return numbers;
}

__device__ const void* input_of(const DeviceSum& sum, int rank) {
  return sum.first == nullptr ? sum.listed[rank]
                              : static_cast<const char*>(sum.first) + rank * sum.stride_bytes;
}

// A thread's findings about the values it stored.
struct Seen {
  double squares = 0.0;
  bool nonfinite = false;
};

// Elements [first, first + kCount) and others that are `stride` apart, as far as they lie before
// `end`.
template <typename Wire, typename Result, int kCount, int kTimes, int kLevels>
__device__ void sum_at(const DeviceSum& sum, int64_t first, int64_t stride, int64_t end,
                       Seen& seen) {
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kTimes; ++i)
      if (first + i * stride < end) body(i, first + i * stride);
  };
  Codes<Result, kCount> stored[kTimes];
  if (sum.adds) each([&](int i, int64_t at) { stored[i] = load<Result, kCount>(sum.output, at); });
  SumTree<float, kLevels> sums[kTimes][kCount];
  for (int begin = 0; begin < sum.num_ranks; begin += kRanksAtOnce) {
    Codes<Wire, kCount> arrived[kRanksAtOnce][kTimes];
    const auto each_rank = [&](const auto& body) {
#pragma unroll
      for (int r = 0; r < kRanksAtOnce; ++r)
        if (begin + r < sum.num_ranks) body(r);
    };
    each_rank([&](int r) {
      const void* input = input_of(sum, begin + r);
      each([&](int i, int64_t at) { arrived[r][i] = load<Wire, kCount>(input, at); });
    });
    each_rank([&](int r) {
      each([&](int i, int64_t) {
        const Numbers<kCount> numbers = widened(arrived[r][i]);
#pragma unroll
        for (int k = 0; k < kCount; ++k) sums[i][k].add(numbers.of[k], begin + r);
      });
    });
  }
  each([&](int i, int64_t at) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float value = sums[i][k].total(sum.num_ranks) * sum.scale;
      if (sum.adds) value = Result::widened(stored[i].code[k]) + value;
      stored[i].code[k] = Result::nearest(value);
      const float exact = Result::widened(stored[i].code[k]);
      seen.squares += static_cast<double>(exact) * exact;
      seen.nonfinite |= !(exact - exact == 0.0f);
    }
    store(sum.output, at, stored[i]);
  });
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
  constexpr int kAtOnce = 16;  // or each load would wait for the one before
  double partial = 0.0;
  for (unsigned begin = threadIdx.x; begin < gridDim.x; begin += kThreads * kAtOnce) {
    double found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned block = begin + i * kThreads;
      // Past this multiprocessor's own cache.
      found[i] = block < gridDim.x ? __ldcg(&workspace->partial[block]) : 0.0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) partial += found[i];
  }
  const double total = block_sum(partial);
  if (threadIdx.x != 0) return;
  *sum.squares += total;
  workspace->arrived = 0;
}

template <typename Wire, typename Result, int kCount, int kLevels>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ DeviceSum sum) {
  constexpr int64_t kStride = int64_t{kThreads} * kCount;  // of a block's vectors
  constexpr int kVectors = vectors_at_once(kLevels);
  constexpr int64_t kTile = kStride * kVectors;
  const int64_t end = sum.numel / kCount * kCount;
  Seen seen;
  for (int64_t tile = blockIdx.x * kTile; tile < end; tile += gridDim.x * kTile)
    sum_at<Wire, Result, kCount, kVectors, kLevels>(sum, tile + threadIdx.x * kCount, kStride, end,
                                                    seen);
  // The rest is less than a vector.
  if (kCount > 1 && blockIdx.x == 0)
    sum_at<Wire, Result, 1, 1, kLevels>(sum, end + threadIdx.x, 1, sum.numel, seen);
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

template <typename Wire, typename Result, int kLevels>
void launch(const DeviceSum& sum, cudaStream_t stream) {
  const bool wide = is_aligned(sum);
  const int64_t per_block = int64_t{kThreads} * vectors_at_once(kLevels) * (wide ? kVector : 1);
  const int64_t wanted = (sum.numel + per_block - 1) / per_block;
  const auto blocks = static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
  if (wide) {
    sum_kernel<Wire, Result, kVector, kLevels><<<blocks, kThreads, 0, stream>>>(sum);
  } else {
    sum_kernel<Wire, Result, 1, kLevels><<<blocks, kThreads, 0, stream>>>(sum);
  }
}

// With the partial sums that so many ranks need.
template <typename Wire, typename Result>
void launch_for_ranks(const DeviceSum& sum, cudaStream_t stream) {
  if (sum.num_ranks < 1 << 3) {
    launch<Wire, Result, 3>(sum, stream);
  } else if (sum.num_ranks < 1 << 4) {
    launch<Wire, Result, 4>(sum, stream);
  } else {
    launch<Wire, Result, kSumLevels>(sum, stream);
  }
}

template <typename Wire>
void launch_to(const DeviceSum& sum, cudaStream_t stream) {
  if (sum.result == DType::kFloat32) launch_for_ranks<Wire, Fp32>(sum, stream);
  if (sum.result == DType::kBFloat16) launch_for_ranks<Wire, Bf16>(sum, stream);
  if (sum.result == DType::kFloat16) launch_for_ranks<Wire, Fp16>(sum, stream);
}

template <typename Number>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const RowSum<Number> sum) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < sum.numel) sum.sum[i] = sum.at(i);
}

template <typename Number>
void launch_rows(const RowSum<Number>& sum, cudaStream_t stream) {
  if (sum.numel == 0) return;
  FSDP_ASSERT(sum.ranks < 1 << kSumLevels);
  const auto blocks = static_cast<unsigned>((sum.numel + kThreads - 1) / kThreads);
  sum_rows_kernel<<<blocks, kThreads, 0, stream>>>(sum);
  check_launch("sum_rows_on_device");
}

}  // namespace

void sum_rows_on_device(const RowSum<float>& sum, void* stream) {
  launch_rows(sum, cuda_stream(stream));
}

void sum_rows_on_device(const RowSum<double>& sum, void* stream) {
  launch_rows(sum, cuda_stream(stream));
}

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
  FSDP_ASSERT(sum.num_ranks < 1 << kSumLevels);
  FSDP_ASSERT(sum.squares == nullptr || sum.workspace != nullptr);
  if (sum.wire == DType::kFloat32) launch_to<Fp32>(sum, cuda_stream(stream));
  if (sum.wire == DType::kBFloat16) launch_to<Bf16>(sum, cuda_stream(stream));
  if (sum.wire == DType::kFloat16) launch_to<Fp16>(sum, cuda_stream(stream));
  check_launch("sum_on_device");
}

}  // namespace fsdp
