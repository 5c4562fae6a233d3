// Cross entropy of rows of logits, a block for each: the block reads its row for the sums, and
// again for the gradient, which it writes in the logits' place. Probabilities exist in registers
// only.
#undef NDEBUG  // targets are checked in every build
#include <cassert>
#include <cfloat>

#include "fsdp/base/check.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

// Threads of a row. With more of them fewer rows are under way at once, so that more of what a
// block reads again is still in the cache.
constexpr int kThreads = 512;

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

// How a block's threads go through a row: by packs, and number by number before and after them.
struct RowParts {
  int64_t head;  // numbers before the first pack
  int64_t num_packs;
  int64_t tail;  // where the numbers after the last pack begin
};

template <typename T>
__device__ RowParts parts_of(const T* row, int64_t size) {
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % kPackBytes / sizeof(T));
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

struct RowGradient {
  int64_t target;  // column, or none
  float base;
  float log_sum;

  template <int kCount>
  __device__ Floats<kCount> of(const Floats<kCount>& logits, int64_t begin) const {
    Floats<kCount> result;
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      result.of[k] = expf(logits.of[k] - base - log_sum) - (begin + k == target ? 1.0f : 0.0f);
    return result;
  }
};

template <typename T, RowWork kWork>
__global__ void __launch_bounds__(kThreads) cross_entropy_rows_kernel(LogitRowsMemory memory) {
  const int64_t size = memory.num_columns;
  T* row = static_cast<T*>(memory.logits) + static_cast<int64_t>(blockIdx.x) * size;
  float* sums = memory.sums + blockIdx.x;
  const RowParts parts = parts_of(row, size);
  const int64_t token = memory.targets[blockIdx.x];
  if (token == kNoTarget) {
    if (kWork != RowWork::kGradient && threadIdx.x < kRowSums)
      sums[threadIdx.x * memory.sums_stride] = 0.0f;
    if constexpr (kWork != RowWork::kSums)
      at_own_numbers<T>(parts, size, [&](auto count, int64_t i) {
        store_pack(row + i, Floats<decltype(count)::value>{});
      });
    return;
  }
  RowGradient gradient{.target = token - memory.first_token, .base = 0.0f, .log_sum = 0.0f};
  if constexpr (kWork == RowWork::kGradient) {
    gradient.base = sums[0];
    gradient.log_sum = sums[memory.sums_stride];
  } else {
    assert(token >= 0 && token < memory.vocabulary && "a target is neither a token nor kNoTarget");
    // Read before the threads join, because the gradient takes its place.
    const bool is_column = gradient.target >= 0 && gradient.target < size;
    const float target_logit = threadIdx.x == 0 && is_column ? widened(row[gradient.target]) : 0.0f;
    ExponentialSum mine{-FLT_MAX, 0.0f};
    at_own_numbers<T>(parts, size, [&](auto count, int64_t i) {
      mine.add(load_pack<decltype(count)::value>(row + i));
    });
    const ExponentialSum all = block_join(mine, joined);
    gradient.base = all.largest;
    gradient.log_sum = logf(all.sum);
    if (threadIdx.x == 0) {
      sums[0] = gradient.base;
      sums[memory.sums_stride] = gradient.log_sum;
      sums[2 * memory.sums_stride] = is_column ? gradient.base - target_logit : 0.0f;
    }
  }
  if constexpr (kWork != RowWork::kSums)
    at_own_numbers<T>(parts, size, [&](auto count, int64_t i) {
      store_pack(row + i, gradient.of(load_pack<decltype(count)::value>(row + i), i));
    });
}

// One block, so that the order of the sum depends only on the number of rows.
__global__ void __launch_bounds__(kThreads)
    cross_entropy_mean_kernel(CrossEntropyMean mean, float* weight, float* loss) {
  const float* log_sums = mean.sums + mean.num_rows;
  const float* gaps = log_sums + mean.num_rows;
  double sum = 0.0;
  for (int64_t row = threadIdx.x; row < mean.num_rows; row += kThreads)
    if (mean.targets[row] != kNoTarget) sum += gaps[row] + log_sums[row];
  int64_t count = 0;
  for (int64_t i = threadIdx.x; i < mean.num_all; i += kThreads)
    count += mean.all_targets[i] != kNoTarget ? 1 : 0;
  sum = block_join(sum, [](double a, double b) { return a + b; });
  count = block_join(count, [](int64_t a, int64_t b) { return a + b; });
  if (threadIdx.x != 0) return;
  const double mean_of = count > 1 ? static_cast<double>(count) : 1.0;
  *weight = static_cast<float>(1.0 / mean_of);
  *loss = static_cast<float>(sum / mean_of);
}

template <RowWork kWork>
void launch_rows(const LogitRowsMemory& memory, void* stream) {
  with_kernel_type(memory.dtype, "cross_entropy_rows", [&](auto zero) {
    cross_entropy_rows_kernel<decltype(zero), kWork>
        <<<static_cast<unsigned>(memory.num_rows), kThreads, 0, cuda_stream(stream)>>>(memory);
  });
}

}  // namespace

void cross_entropy_rows_on_device(RowWork work, const LogitRowsMemory& memory, void* stream) {
  FSDP_CHECK(memory.num_rows <= INT32_MAX, "the cross entropy of ", memory.num_rows,
             " tokens was asked for at once; this is more than a launch can have");
  if (memory.num_rows == 0) return;
  switch (work) {
    case RowWork::kSums:
      launch_rows<RowWork::kSums>(memory, stream);
      break;
    case RowWork::kGradient:
      launch_rows<RowWork::kGradient>(memory, stream);
      break;
    case RowWork::kBoth:
      launch_rows<RowWork::kBoth>(memory, stream);
      break;
  }
  check_launch("cross_entropy_rows");
}

void cross_entropy_mean_on_device(const CrossEntropyMean& mean, float* weight, float* loss,
                                  void* stream) {
  cross_entropy_mean_kernel<<<1, kThreads, 0, cuda_stream(stream)>>>(mean, weight, loss);
  check_launch("cross_entropy_mean");
}

}  // namespace fsdp::nn
