// Root-mean-square norms of rows. A team of threads holds a row in its registers, so that the row
// is read once and written once. Weight gradients are summed in fixed order: by every team over its
// rows, by a block over its teams, then over the blocks.
#include "fsdp/base/check.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Thread blocks that run at once on a multiprocessor, if threads have one pack of a row each; more
// packs take more registers.
constexpr int kBlocksAtOnce = 4;
// Thread blocks of the backward: as many as run at once on an H100. A constant, so that sums have
// the same order on every device.
constexpr int kMaxSums = 128 * kBlocksAtOnce;

// A thread's team, and the thread's packs of a row: `lane`, `lane` + kTeam, ...
template <int kTeam>
struct Team {
  static constexpr int kPerBlock = kThreads / kTeam;
  static __device__ int in_block() { return static_cast<int>(threadIdx.x) / kTeam; }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kTeam; }
};

// The sum of a team's values, in each of its threads. `turn` separates calls that follow one
// another: the next one may write while this one is read.
template <int kTeam>
__device__ float team_sum(float value, int turn) {
  constexpr int kTogether = kTeam < kWarp ? kTeam : kWarp;
#pragma unroll
  for (int step = kTogether / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if constexpr (kTeam > kWarp) {
    __shared__ float sums[2][kThreads / kWarp];
    if (threadIdx.x % kWarp == 0) sums[turn % 2][threadIdx.x / kWarp] = value;
    __syncthreads();
    constexpr int kWarps = kTeam / kWarp;
    value = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      value += sums[turn % 2][Team<kTeam>::in_block() * kWarps + warp];
  }
  return value;
}

// Calls body(k, begin) for this thread's packs of a row.
template <int kTeam, int kPacks, int kCount, typename Body>
__device__ void at_own_packs(int size, const Body& body) {
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int begin = (k * kTeam + Team<kTeam>::lane()) * kCount;
    if (begin < size) body(k, begin);
  }
}

template <typename T, int kTeam, int kPacks>
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(__grid_constant__ const NormInput in, __grid_constant__ const NormOutput out) {
  constexpr int kCount = kPackCount<T>;
  using Numbers = Floats<kCount>;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * Team<kTeam>::kPerBlock + Team<kTeam>::in_block();
  const bool has_row = row < in.num_rows;  // threads without a row take part in sums
  const int size = has_row ? static_cast<int>(in.size) : 0;
  const int64_t offset = row * in.size;
  Numbers x[kPacks];
  float squares = 0.0f;
  at_own_packs<kTeam, kPacks, kCount>(size, [&](int k, int begin) {
    x[k] = load_pack<kCount>(static_cast<const T*>(in.x) + offset + begin);
    if (in.added != nullptr) {
      const Numbers more = load_pack<kCount>(static_cast<const T*>(in.added) + offset + begin);
      // Rounded before the norm, as a sum that is stored in memory would be.
      for (int i = 0; i < kCount; ++i) x[k].of[i] = widened(rounded<T>(x[k].of[i] + more.of[i]));
      store_pack(static_cast<T*>(out.sum) + offset + begin, x[k]);
    }
    for (int i = 0; i < kCount; ++i) squares += x[k].of[i] * x[k].of[i];
  });
  squares = team_sum<kTeam>(squares, 0);
  const float scale = rsqrtf(squares / static_cast<float>(in.size) + in.eps);
  at_own_packs<kTeam, kPacks, kCount>(size, [&](int k, int begin) {
    const Numbers w = load_pack<kCount>(static_cast<const T*>(in.weight) + begin);
    Numbers y;
    for (int i = 0; i < kCount; ++i) y.of[i] = x[k].of[i] * scale * (in.weight_offset + w.of[i]);
    store_pack(static_cast<T*>(out.normed) + offset + begin, y);
  });
  if (has_row && Team<kTeam>::lane() == 0) out.scales[row] = scale;
}

// Adds up the sums of a block's teams, and stores them.
template <int kTeam, int kPacks, int kCount>
__device__ void store_block_sums(const Floats<kCount> (&mine)[kPacks], int size, float* to) {
  if constexpr (kTeam == kThreads) {
    at_own_packs<kTeam, kPacks, kCount>(size, [&](int k, int begin) {
      for (int i = 0; i < kCount; ++i) to[begin + i] = mine[k].of[i];
    });
  } else {
    constexpr int kWidth = kTeam * kPacks * kCount;
    __shared__ float sums[Team<kTeam>::kPerBlock][kWidth];
    at_own_packs<kTeam, kPacks, kCount>(size, [&](int k, int begin) {
      for (int i = 0; i < kCount; ++i) sums[Team<kTeam>::in_block()][begin + i] = mine[k].of[i];
    });
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
      float sum = 0.0f;
      for (int team = 0; team < Team<kTeam>::kPerBlock; ++team) sum += sums[team][i];
      to[i] = sum;
    }
  }
}

// A thread's part of a row, as in memory: loaded while the row before is computed.
template <typename T, int kPacks>
struct RowPart {
  RawPack<T> x[kPacks];
  RawPack<T> of_normed[kPacks];
  RawPack<T> of_sum[kPacks];
  float scale;
};

template <int kTeam, typename T, int kPacks>
__device__ void load_row(const NormInput& in, const NormGradients& by, int64_t row,
                         RowPart<T, kPacks>& part) {
  if (row >= in.num_rows) return;
  constexpr int kCount = kPackCount<T>;
  const int64_t offset = row * in.size;
  const auto load = [&](const void* rows, int begin) {
    return load_raw_pack(static_cast<const T*>(rows) + offset + begin);
  };
  at_own_packs<kTeam, kPacks, kCount>(static_cast<int>(in.size), [&](int k, int begin) {
    part.x[k] = load(in.x, begin);
    part.of_normed[k] = load(by.of_normed, begin);
    if (by.of_sum != nullptr) part.of_sum[k] = load(by.of_sum, begin);
  });
  part.scale = by.scales[row];
}

template <typename T, int kTeam, int kPacks>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce / kPacks)
    rms_norm_backward_kernel(__grid_constant__ const NormInput in,
                             __grid_constant__ const NormGradients by) {
  constexpr int kCount = kPackCount<T>;
  using Numbers = Floats<kCount>;
  const int size = static_cast<int>(in.size);
  Numbers dw[kPacks]{};
  const int64_t num_teams = static_cast<int64_t>(gridDim.x) * Team<kTeam>::kPerBlock;
  int64_t row = static_cast<int64_t>(blockIdx.x) * Team<kTeam>::kPerBlock + Team<kTeam>::in_block();
  RowPart<T, kPacks> next;
  load_row<kTeam>(in, by, row, next);
  // All teams of a block take as many turns, since they sum together.
  int turn = 0;
  for (int64_t first = row - Team<kTeam>::in_block(); first < in.num_rows;
       first += num_teams, row += num_teams, ++turn) {
    const RowPart<T, kPacks> part = next;
    load_row<kTeam>(in, by, row + num_teams, next);
    const int row_size = row < in.num_rows ? size : 0;
    Numbers x[kPacks];  // x * scale
    Numbers g[kPacks];
    float dot = 0.0f;
    at_own_packs<kTeam, kPacks, kCount>(row_size, [&](int k, int begin) {
      const Numbers w = load_pack<kCount>(static_cast<const T*>(in.weight) + begin);
      x[k] = widened(part.x[k]);
      g[k] = widened(part.of_normed[k]);
      for (int i = 0; i < kCount; ++i) {
        x[k].of[i] *= part.scale;
        dw[k].of[i] += g[k].of[i] * x[k].of[i];
        g[k].of[i] *= in.weight_offset + w.of[i];
        dot += g[k].of[i] * x[k].of[i];
      }
    });
    const float along = team_sum<kTeam>(dot, turn) / static_cast<float>(in.size);
    at_own_packs<kTeam, kPacks, kCount>(row_size, [&](int k, int begin) {
      Numbers dx{};
      if (by.of_sum != nullptr) dx = widened(part.of_sum[k]);
      for (int i = 0; i < kCount; ++i) dx.of[i] += part.scale * (g[k].of[i] - x[k].of[i] * along);
      store_pack(static_cast<T*>(by.of_x) + row * in.size + begin, dx);
    });
  }
  store_block_sums<kTeam, kPacks, kCount>(dw, size, by.weight_sums + blockIdx.x * in.size);
}

// A block adds up kWarp columns; each of its warps takes every 32nd row of sums.
template <typename T>
__global__ void __launch_bounds__(kWarp* kWarp)
    rms_norm_weight_kernel(const float* sums, int num_sums, int64_t size, T* gradient) {
  __shared__ float parts[kWarp][kWarp + 1];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.0f;
  if (column < size)
    for (int i = static_cast<int>(threadIdx.y); i < num_sums; i += kWarp)
      sum += sums[i * size + column];
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= size) return;
  sum = 0.0f;
  for (int i = 0; i < kWarp; ++i) sum += parts[i][threadIdx.x];
  gradient[column] = rounded<T>(sum);
}

template <int kValue>
inline constexpr std::integral_constant<int, kValue> kConstant;

// Calls function(team, packs) with the smallest team that can hold a row.
template <int kCount, typename Function>
void with_team(int64_t size, const Function& function) {
  const auto choose = [&](auto team, auto packs) {
    if (size > int64_t{team} * packs * kCount) return false;
    function(team, packs);
    return true;
  };
  static_assert(4 * kThreads == kMaxNormPacks);
  if (choose(kConstant<16>, kConstant<1>) || choose(kConstant<32>, kConstant<1>) ||
      choose(kConstant<64>, kConstant<1>) || choose(kConstant<128>, kConstant<1>) ||
      choose(kConstant<kThreads>, kConstant<1>) || choose(kConstant<kThreads>, kConstant<2>) ||
      choose(kConstant<kThreads>, kConstant<4>))
    return;
  FSDP_ASSERT(false, "no team of threads holds rows of ", size);
}

int64_t blocks_for(int64_t num_rows, int rows_per_block) {
  return (num_rows + rows_per_block - 1) / rows_per_block;
}

}  // namespace

bool norm_fits_device(DType dtype, int64_t size) {
  const int64_t count = kPackBytes / element_bytes(dtype);
  return size > 0 && size % count == 0 && size <= kMaxNormPacks * count;
}

int64_t norm_weight_sums(int64_t num_rows) { return num_rows < kMaxSums ? num_rows : kMaxSums; }

void rms_norm_on_device(const NormInput& input, const NormOutput& output, void* stream) {
  if (input.num_rows == 0) return;
  with_kernel_type(input.dtype, "rms_norm", [&](auto zero) {
    using T = decltype(zero);
    with_team<kPackCount<T>>(input.size, [&](auto team, auto packs) {
      const int64_t blocks = blocks_for(input.num_rows, Team<team>::kPerBlock);
      rms_norm_kernel<T, team, packs>
          <<<static_cast<unsigned>(blocks), kThreads, 0, cuda_stream(stream)>>>(input, output);
    });
  });
  check_launch("rms_norm");
}

void rms_norm_backward_on_device(const NormInput& input, const NormGradients& gradients,
                                 void* stream) {
  with_kernel_type(input.dtype, "rms_norm_backward", [&](auto zero) {
    using T = decltype(zero);
    int num_sums = 0;
    with_team<kPackCount<T>>(input.size, [&](auto team, auto packs) {
      const int64_t blocks = blocks_for(input.num_rows, Team<team>::kPerBlock);
      num_sums = static_cast<int>(blocks < kMaxSums / packs ? blocks : kMaxSums / packs);
      if (num_sums > 0)
        rms_norm_backward_kernel<T, team, packs>
            <<<static_cast<unsigned>(num_sums), kThreads, 0, cuda_stream(stream)>>>(input,
                                                                                    gradients);
    });
    const auto columns = static_cast<unsigned>((input.size + kWarp - 1) / kWarp);
    rms_norm_weight_kernel<T><<<columns, dim3(kWarp, kWarp), 0, cuda_stream(stream)>>>(
        gradients.weight_sums, num_sums, input.size, static_cast<T*>(gradients.of_weight));
  });
  check_launch("rms_norm_backward");
}

}  // namespace fsdp::nn
