// Cross entropy of logits. The forward reads them once; the backward reads them once and writes the
// gradient. Probabilities exist in registers only.
#undef NDEBUG  // targets are checked in every build
#include <cassert>
#include <cfloat>

#include "fsdp/base/check.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

constexpr int kThreads = 256;  // of a row

// Joins the values of a block's threads, for every thread; halves are joined in fixed order.
template <typename Value, typename Join>
__device__ Value block_join(Value value, const Join& join) {
  __shared__ Value values[kThreads];
  values[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      values[threadIdx.x] = join(values[threadIdx.x], values[threadIdx.x + half]);
  }
  __syncthreads();
  return values[0];
}

// How a block's threads go through a row, or through another one of the same alignment: by packs,
// and number by number before and after them.
struct RowParts {
  int64_t head;  // numbers before the first pack
  int64_t num_packs;
  int64_t tail;  // where the numbers after the last pack begin
};

template <typename T>
__device__ int64_t past_pack(const T* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % kPackBytes / sizeof(T));
}

template <typename T>
__device__ RowParts parts_of(const T* row, const T* like, int64_t size) {
  const int64_t past = past_pack(row);
  if (past != past_pack(like)) return {size, 0, size};
  const int64_t head = past == 0 ? 0 : min(size, kPackCount<T> - past);
  const int64_t num_packs = (size - head) / kPackCount<T>;
  return {head, num_packs, head + num_packs * kPackCount<T>};
}

// Calls body(count, begin) for this thread's numbers of a row.
template <typename T, typename Body>
__device__ void at_own_numbers(const RowParts& parts, int64_t size, const Body& body) {
  constexpr std::integral_constant<int, 1> kOne;
  constexpr std::integral_constant<int, kPackCount<T>> kWhole;
  const auto thread = static_cast<int64_t>(threadIdx.x);
  for (int64_t i = thread; i < parts.head; i += kThreads) body(kOne, i);
#pragma unroll 4
  for (int64_t i = thread; i < parts.num_packs; i += kThreads)
    body(kWhole, parts.head + i * kPackCount<T>);
  if (parts.tail + thread < size) body(kOne, parts.tail + thread);
}

// A sum of exponentials, relative to the largest so far.
struct ExponentialSum {
  float largest;
  float sum;

  template <int kCount>
  __device__ void add(const Floats<kCount>& values) {
    float top = largest;
#pragma unroll
    for (int k = 0; k < kCount; ++k) top = fmaxf(top, values.of[k]);
    if (top > largest) {  // rare after the first numbers
      sum *= expf(largest - top);
      largest = top;
    }
    float more = 0.0f;
#pragma unroll
    for (int k = 0; k < kCount; ++k) more += expf(values.of[k] - largest);
    sum += more;
  }
};

__device__ ExponentialSum joined(const ExponentialSum& a, const ExponentialSum& b) {
  const float top = fmaxf(a.largest, b.largest);
  return {top, a.sum * expf(a.largest - top) + b.sum * expf(b.largest - top)};
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(const T* logits, int64_t vocabulary, const int64_t* targets,
                         float2* row_sums, float* row_losses) {
  const int64_t target = targets[blockIdx.x];
  if (target == kNoTarget) {  // the gradient is 0 for any sum
    if (threadIdx.x == 0) {
      row_sums[blockIdx.x] = {0.0f, 0.0f};
      row_losses[blockIdx.x] = 0.0f;
    }
    return;
  }
  const T* row = logits + static_cast<int64_t>(blockIdx.x) * vocabulary;
  ExponentialSum mine{-FLT_MAX, 0.0f};
  at_own_numbers<T>(parts_of(row, row, vocabulary), vocabulary, [&](auto count, int64_t i) {
    mine.add(load_pack<decltype(count)::value>(row + i));
  });
  const ExponentialSum all = block_join(mine, joined);
  if (threadIdx.x != 0) return;
  assert(target >= 0 && target < vocabulary && "a target is neither a token nor kNoTarget");
  const float log_sum = logf(all.sum);
  row_sums[blockIdx.x] = {all.largest, log_sum};
  row_losses[blockIdx.x] = all.largest - widened(row[target]) + log_sum;
}

// One block, so that the order of the sum depends only on the number of rows.
__global__ void __launch_bounds__(kThreads)
    cross_entropy_mean_kernel(const float* row_losses, const int64_t* targets, int64_t num_rows,
                              float* weight, float* loss) {
  double sum = 0.0;
  int64_t count = 0;
  for (int64_t row = threadIdx.x; row < num_rows; row += kThreads) {
    sum += row_losses[row];
    count += targets[row] != kNoTarget ? 1 : 0;
  }
  sum = block_join(sum, [](double a, double b) { return a + b; });
  count = block_join(count, [](int64_t a, int64_t b) { return a + b; });
  if (threadIdx.x != 0) return;
  const double mean_of = count > 1 ? static_cast<double>(count) : 1.0;
  *weight = static_cast<float>(1.0 / mean_of);
  *loss = static_cast<float>(sum / mean_of);
}

struct RowGradient {
  int64_t target;
  float2 sum;  // the largest logit, and the logarithm of the rest
  float scale;

  template <int kCount>
  __device__ Floats<kCount> of(const Floats<kCount>& logits, int64_t begin) const {
    Floats<kCount> result;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float probability = expf(logits.of[k] - sum.x - sum.y);
      result.of[k] = (probability - (begin + k == target ? 1.0f : 0.0f)) * scale;
    }
    return result;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(const T* logits, int64_t vocabulary, const int64_t* targets,
                                  const float2* row_sums, const float* weight,
                                  const float* loss_gradient, T* gradient) {
  const RowGradient by{.target = targets[blockIdx.x],
                       .sum = row_sums[blockIdx.x],
                       .scale = *weight * *loss_gradient};
  const T* row = logits + static_cast<int64_t>(blockIdx.x) * vocabulary;
  T* to = gradient + static_cast<int64_t>(blockIdx.x) * vocabulary;
  at_own_numbers<T>(parts_of(row, static_cast<const T*>(to), vocabulary), vocabulary,
                    [&](auto count, int64_t i) {
                      constexpr int kCount = decltype(count)::value;
                      Floats<kCount> values{};
                      if (by.target != kNoTarget) values = by.of(load_pack<kCount>(row + i), i);
                      store_pack(to + i, values);
                    });
}

void check_size(const CrossEntropyMemory& memory) {
  FSDP_CHECK(memory.num_rows <= INT32_MAX, "the cross entropy of ", memory.num_rows,
             " tokens was asked for at once; this is more than a launch can have");
}

}  // namespace

void cross_entropy_on_device(const CrossEntropyMemory& memory, float* row_losses, float* loss,
                             void* stream) {
  check_size(memory);
  if (memory.num_rows > 0)
    with_kernel_type(memory.dtype, "cross_entropy", [&](auto zero) {
      using T = decltype(zero);
      cross_entropy_kernel<T>
          <<<static_cast<unsigned>(memory.num_rows), kThreads, 0, cuda_stream(stream)>>>(
              static_cast<const T*>(memory.logits), memory.vocabulary, memory.targets,
              reinterpret_cast<float2*>(memory.row_sums), row_losses);
    });
  cross_entropy_mean_kernel<<<1, kThreads, 0, cuda_stream(stream)>>>(
      row_losses, memory.targets, memory.num_rows, memory.weight, loss);
  check_launch("cross_entropy");
}

void cross_entropy_backward_on_device(const CrossEntropyMemory& memory, const float* loss_gradient,
                                      void* gradient, void* stream) {
  check_size(memory);
  if (memory.num_rows == 0) return;
  with_kernel_type(memory.dtype, "cross_entropy_backward", [&](auto zero) {
    using T = decltype(zero);
    cross_entropy_backward_kernel<T>
        <<<static_cast<unsigned>(memory.num_rows), kThreads, 0, cuda_stream(stream)>>>(
            static_cast<const T*>(memory.logits), memory.vocabulary, memory.targets,
            reinterpret_cast<const float2*>(memory.row_sums), memory.weight, loss_gradient,
            static_cast<T*>(gradient));
  });
  check_launch("cross_entropy_backward");
}

}  // namespace fsdp::nn
