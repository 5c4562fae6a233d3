// Rows to codes with one scale each. A team of threads holds a row in its registers, so that it is
// read once and written once, in half the bytes.
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/code_words.cuh"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

template <typename T>
struct Rows {
  int64_t rows;
  int64_t columns;
  const T* numbers;
  const float* column_multipliers;
  uint8_t* codes;
  float* scales;
};

// The largest value of a team's threads, in each of them.
template <int kTeam>
__device__ uint32_t team_max(uint32_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    value = max(value, __shfl_xor_sync(~0u, value, step));
  if constexpr (kTeam > kWarp) {
    __shared__ uint32_t maxes[kThreads / kWarp];
    if (threadIdx.x % kWarp == 0) maxes[threadIdx.x / kWarp] = value;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / kWarp; ++warp) value = max(value, maxes[warp]);
  }
  return value;
}

// The numbers that are quantised.
template <typename T>
__device__ Floats<kPackCount<T>> multiplied(const RawPack<T>& raw, const float* multipliers,
                                            int begin) {
  Floats<kPackCount<T>> x = widened(raw);
  if (multipliers == nullptr) return x;
#pragma unroll
  for (int i = 0; i < kPackCount<T>; i += kVector) {
    const Floats<kVector> by = load_pack<kVector>(multipliers + begin + i);
#pragma unroll
    for (int k = 0; k < kVector; ++k) x.of[i + k] *= by.of[k];
  }
  return x;
}

template <int kCount>
__device__ uint32_t largest(uint32_t most, const Floats<kCount>& x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) most = max(most, magnitude_bits(x.of[i]));
  return most;
}

template <int kCount>
__device__ void store_codes(uint8_t* to, const Floats<kCount>& x, float factor) {
  Pack<uint32_t, kCount / kVector> words;
#pragma unroll
  for (int i = 0; i < kCount / kVector; ++i)
    words.of[i] = code_word(each([&](int k) { return x.of[i * kVector + k] * factor; }));
  *reinterpret_cast<Pack<uint32_t, kCount / kVector>*>(to) = words;
}

// A thread's packs of a row are `lane`, `lane` + kTeam, ...: the first kPacks stay in registers,
// more (of very long rows) are read again.
template <typename T, int kTeam, int kPacks>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(Rows<T> r) {
  constexpr int kCount = kPackCount<T>;
  constexpr int kPerBlock = kThreads / kTeam;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * kPerBlock + static_cast<int>(threadIdx.x) / kTeam;
  if (row >= r.rows) return;  // whole teams, and a team of a block has its row
  const int lane = static_cast<int>(threadIdx.x) % kTeam;
  const int columns = static_cast<int>(r.columns);
  const T* from = r.numbers + row * r.columns;
  const auto begin_of = [&](int k) { return (k * kTeam + lane) * kCount; };

  RawPack<T> held[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    if (begin_of(k) < columns) held[k] = load_raw_pack(from + begin_of(k));
  uint32_t most = 0;
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    if (begin_of(k) < columns)
      most = largest(most, multiplied(held[k], r.column_multipliers, begin_of(k)));
  for (int k = kPacks; begin_of(k) < columns; ++k)
    most = largest(
        most, multiplied(load_raw_pack(from + begin_of(k)), r.column_multipliers, begin_of(k)));

  const float factor = factor_of(team_max<kTeam>(most));
  uint8_t* to = r.codes + row * r.columns;
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    if (begin_of(k) < columns)
      store_codes(to + begin_of(k), multiplied(held[k], r.column_multipliers, begin_of(k)), factor);
  for (int k = kPacks; begin_of(k) < columns; ++k)
    store_codes(to + begin_of(k),
                multiplied(load_raw_pack(from + begin_of(k)), r.column_multipliers, begin_of(k)),
                factor);
  if (lane == 0) r.scales[row] = fp8_scale(factor);
}

template <typename T, int kTeam, int kPacks>
void launch(const Rows<T>& rows, void* stream) {
  constexpr int kPerBlock = kThreads / kTeam;
  const auto blocks = static_cast<unsigned>((rows.rows + kPerBlock - 1) / kPerBlock);
  quantize_rows_kernel<T, kTeam, kPacks><<<blocks, kThreads, 0, cuda_stream(stream)>>>(rows);
}

}  // namespace

void quantize_rows_on_device(const QuantizeMemory& memory, void* stream) {
  if (memory.rows == 0 || memory.columns == 0) return;
  with_kernel_type(memory.dtype, "quantize_rows", [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> rows{memory.rows,
                       memory.columns,
                       static_cast<const T*>(memory.numbers),
                       memory.column_multipliers,
                       memory.by_rows.codes,
                       memory.by_rows.scales};
    const int64_t packs = memory.columns / kPackCount<T>;
    if (packs <= kWarp * 2)
      launch<T, kWarp, 2>(rows, stream);
    else if (packs <= kThreads)
      launch<T, kThreads, 1>(rows, stream);
    else if (packs <= kThreads * 2)
      launch<T, kThreads, 2>(rows, stream);
    else if (packs <= kThreads * 4)
      launch<T, kThreads, 4>(rows, stream);
    else
      launch<T, kThreads, 8>(rows, stream);
  });
  check_launch("quantize_rows");
}

}  // namespace fsdp::nn
