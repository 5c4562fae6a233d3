// Choices sorted by expert, and the rows that come back from experts added up: every row is read
// once, where it lies.
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

constexpr int kWarp = 32;
constexpr int kRowThreads = 128;   // a warp per token
constexpr int kSortThreads = 256;  // a thread per choice
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kScanThreads = 1024;  // a warp per expert
constexpr unsigned kAllLanes = 0xffffffffu;

int64_t blocks_of(int64_t count, int64_t per_block) { return (count + per_block - 1) / per_block; }

__device__ float warp_sum(float value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// --- rows ----------------------------------------------------------------------------------------

template <typename T>
struct Combined {
  int64_t num_tokens;
  int64_t num_chosen;
  int64_t size;
  const T* rows;
  const int64_t* row_of_choice;
  const T* weights;

  __device__ float weight(int64_t choice) const {
    return weights == nullptr ? 1.0f : widened(weights[choice]);
  }
};

__device__ int64_t own_token() {
  return (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / kWarp;
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kRowThreads) combine_kernel(Combined<T> c, T* result) {
  const int64_t token = own_token();
  if (token >= c.num_tokens) return;
  const int64_t first = token * c.num_chosen;
  for (int64_t i = threadIdx.x % kWarp * kCount; i < c.size; i += kWarp * kCount) {
    Floats<kCount> sum{};
    for (int64_t choice = first; choice < first + c.num_chosen; ++choice) {
      const int64_t row = c.row_of_choice[choice];
      if (row < 0) continue;
      const float weight = c.weight(choice);
      const Floats<kCount> numbers = load_pack<kCount>(c.rows + row * c.size + i);
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum.of[k] += weight * numbers.of[k];
    }
    store_pack(result + token * c.size + i, sum);
  }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kRowThreads)
    combine_backward_kernel(Combined<T> c, const T* gradient, T* of_rows, T* of_weights) {
  const int64_t token = own_token();
  if (token >= c.num_tokens) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t first = token * c.num_chosen;
  for (int64_t choice = first; choice < first + c.num_chosen; ++choice) {
    const int64_t row = c.row_of_choice[choice];
    float product = 0.0f;
    if (row >= 0) {
      const float weight = c.weight(choice);
      for (int64_t i = lane * kCount; i < c.size; i += kWarp * kCount) {
        const Floats<kCount> numbers = load_pack<kCount>(c.rows + row * c.size + i);
        Floats<kCount> of_sum = load_pack<kCount>(gradient + token * c.size + i);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          product += of_sum.of[k] * numbers.of[k];
          of_sum.of[k] *= weight;
        }
        store_pack(of_rows + row * c.size + i, of_sum);
      }
    }
    product = warp_sum(product);
    if (lane == 0) of_weights[choice] = rounded<T>(product);
  }
}

template <typename T>
Combined<T> of_type(const CombineMemory& m) {
  return {m.num_tokens,    m.num_chosen,
          m.size,          static_cast<const T*>(m.rows),
          m.row_of_choice, static_cast<const T*>(m.weights)};
}

bool rows_are_packs(const CombineMemory& memory) {
  return memory.size % (kPackBytes / element_bytes(memory.dtype)) == 0 &&
         begins_a_pack(memory.rows);
}

unsigned row_blocks(const CombineMemory& memory) {
  return static_cast<unsigned>(blocks_of(memory.num_tokens, kRowThreads / kWarp));
}

// --- choices -------------------------------------------------------------------------------------

// Per block, how many of its choices are of each expert.
__global__ void __launch_bounds__(kSortThreads) count_kernel(ChoiceOrder o) {
  extern __shared__ int32_t counts[];
  for (int64_t e = threadIdx.x; e < o.num_experts; e += kSortThreads) counts[e] = 0;
  __syncthreads();
  const int64_t choice = static_cast<int64_t>(blockIdx.x) * kSortThreads + threadIdx.x;
  if (choice < o.num_choices) atomicAdd(&counts[o.chosen[choice]], 1);
  __syncthreads();
  int32_t* own = o.block_counts + blockIdx.x * o.num_experts;
  for (int64_t e = threadIdx.x; e < o.num_experts; e += kSortThreads) own[e] = counts[e];
}

// Turns the counts of each expert into those of the blocks before, and adds up the ends.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(ChoiceOrder o, int64_t num_blocks) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t e = threadIdx.x / kWarp; e < o.num_experts; e += kScanThreads / kWarp) {
    int32_t before = 0;
    for (int64_t first = 0; first < num_blocks; first += kWarp) {
      const int64_t block = first + lane;
      int32_t* place = o.block_counts + block * o.num_experts + e;
      const int32_t count = block < num_blocks ? *place : 0;
      int32_t sum = count;
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += other;
      }
      if (block < num_blocks) *place = before + sum - count;
      before += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    if (lane == 0) o.ends[e] = before;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int64_t e = 1; e < o.num_experts; ++e) o.ends[e] += o.ends[e - 1];
}

// A choice comes after those of earlier experts, earlier blocks, earlier warps and earlier lanes.
__global__ void __launch_bounds__(kSortThreads) place_kernel(ChoiceOrder o) {
  extern __shared__ int32_t counts[];  // per warp and expert
  for (int64_t i = threadIdx.x; i < kSortWarps * o.num_experts; i += kSortThreads) counts[i] = 0;
  __syncthreads();
  const int64_t choice = static_cast<int64_t>(blockIdx.x) * kSortThreads + threadIdx.x;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int expert = choice < o.num_choices ? static_cast<int>(o.chosen[choice]) : -1;
  const unsigned alike = __match_any_sync(kAllLanes, expert);
  const int earlier = __popc(alike & ((1u << lane) - 1u));
  if (expert >= 0 && earlier == 0) counts[warp * o.num_experts + expert] = __popc(alike);
  __syncthreads();
  if (expert < 0) return;
  int64_t place = (expert == 0 ? 0 : o.ends[expert - 1]) + earlier +
                  o.block_counts[blockIdx.x * o.num_experts + expert];
  for (int before = 0; before < warp; ++before) place += counts[before * o.num_experts + expert];
  o.order[place] = choice;
  o.inverse[choice] = place;
}

}  // namespace

void combine_on_device(const CombineMemory& memory, void* result, void* stream) {
  if (memory.num_tokens == 0) return;
  with_kernel_type(memory.dtype, "combine", [&](auto zero) {
    using T = decltype(zero);
    const bool in_packs = rows_are_packs(memory) && begins_a_pack(result);
    const auto kernel = in_packs ? combine_kernel<T, kPackCount<T>> : combine_kernel<T, 1>;
    kernel<<<row_blocks(memory), kRowThreads, 0, cuda_stream(stream)>>>(of_type<T>(memory),
                                                                        static_cast<T*>(result));
  });
  check_launch("combine");
}

void combine_backward_on_device(const CombineMemory& memory, const void* gradient, void* of_rows,
                                void* of_weights, void* stream) {
  if (memory.num_tokens == 0) return;
  with_kernel_type(memory.dtype, "combine_backward", [&](auto zero) {
    using T = decltype(zero);
    const bool in_packs =
        rows_are_packs(memory) && begins_a_pack(gradient) && begins_a_pack(of_rows);
    const auto kernel =
        in_packs ? combine_backward_kernel<T, kPackCount<T>> : combine_backward_kernel<T, 1>;
    kernel<<<row_blocks(memory), kRowThreads, 0, cuda_stream(stream)>>>(
        of_type<T>(memory), static_cast<const T*>(gradient), static_cast<T*>(of_rows),
        static_cast<T*>(of_weights));
  });
  check_launch("combine_backward");
}

int64_t choice_block_counts(int64_t num_choices, int64_t num_experts) {
  return blocks_of(num_choices, kSortThreads) * num_experts;
}

void sort_choices_on_device(const ChoiceOrder& order, void* stream) {
  const int64_t num_blocks = blocks_of(order.num_choices, kSortThreads);
  const auto grid = static_cast<unsigned>(num_blocks);
  const auto counts = static_cast<size_t>(order.num_experts) * sizeof(int32_t);
  if (grid > 0) count_kernel<<<grid, kSortThreads, counts, cuda_stream(stream)>>>(order);
  scan_kernel<<<1, kScanThreads, 0, cuda_stream(stream)>>>(order, num_blocks);
  if (grid > 0)
    place_kernel<<<grid, kSortThreads, kSortWarps * counts, cuda_stream(stream)>>>(order);
  check_launch("sort_choices");
}

}  // namespace fsdp::nn
