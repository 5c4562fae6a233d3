// Quantising as CUDA kernels. A warp goes through a strip of neighbouring elements in chunks of
// 128: four for each lane. (Loops over a lane's elements are unrolled, so that registers hold
// them.)
#include <cuda_fp8.h>

#include <algorithm>

#include "fsdp/base/block_scale.h"
#include "fsdp/base/check.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/shard/group/quantize_part.h"

namespace fsdp {

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kPerLane = 4;
constexpr int kChunk = kLanes * kPerLane;
constexpr int kChunks = 4;  // whose loads are under way together
constexpr int kStrip = kChunks * kChunk;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Strips {
  MatrixPart part;
  SharedScales scales;
};

// A lane's four elements, or fewer at the part's end.
struct LaneElements {
  float of[kPerLane];
  int count;
};

__device__ LaneElements load_elements(const MatrixPart& part, int64_t at) {
  LaneElements elements{{0.0f, 0.0f, 0.0f, 0.0f}, 0};
  const int64_t left = part.range.numel() - at;
  elements.count = left >= kPerLane ? kPerLane : left > 0 ? static_cast<int>(left) : 0;
  if (elements.count == kPerLane && reinterpret_cast<uintptr_t>(part.values + at) % 16 == 0) {
    const float4 loaded = *reinterpret_cast<const float4*>(part.values + at);
    elements.of[0] = loaded.x;
    elements.of[1] = loaded.y;
    elements.of[2] = loaded.z;
    elements.of[3] = loaded.w;
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k)
      if (k < elements.count) elements.of[k] = part.values[at + k];
  }
  return elements;
}

__device__ int64_t strip_begin() {
  return (int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes) * kStrip;
}

// --- scales --------------------------------------------------------------------------------------

// An element's place in the matrix. Rows and columns have 32 bits: divisions of 64 took longer than
// the memory.
struct MatrixPlace {
  uint32_t row;
  uint32_t column;

  __device__ MatrixPlace(const MatrixPart& part, int64_t at)
      : row(static_cast<uint32_t>((part.range.begin + at) / part.columns)),
        column(static_cast<uint32_t>((part.range.begin + at) % part.columns)) {}

  __device__ void advance(uint32_t count, uint32_t columns) {
    column += count;
    row += column / columns;
    column %= columns;
  }
};

__device__ int64_t scale_at(const SharedScales& scales, const MatrixPlace& place) {
  const uint32_t above = place.row / static_cast<uint32_t>(scales.block_rows);
  return above * scales.per_row + place.column / static_cast<uint32_t>(scales.block_columns);
}

// The scale of `count` elements from a place on, if they have one: -1 if not.
__device__ int64_t one_scale(const Strips& strips, const MatrixPlace& first, uint32_t count) {
  MatrixPlace last = first;
  last.advance(count - 1, static_cast<uint32_t>(strips.part.columns));
  const int64_t scale = scale_at(strips.scales, first);
  const bool is_between = last.row == first.row || strips.scales.per_row == 1;
  return is_between && scale_at(strips.scales, last) == scale ? scale : -1;
}

// Goes through a warp's strip: one(elements, at, scale) for chunks whose elements have one scale,
// nearly all, and many(elements, at, scales of the lane's elements) for the others. All lanes are
// in the same one of them.
template <typename One, typename Many>
__device__ void for_each_chunk(const Strips& strips, const One& one, const Many& many) {
  const int64_t numel = strips.part.range.numel();
  const int64_t begin = strip_begin();
  if (begin >= numel) return;
  const auto columns = static_cast<uint32_t>(strips.part.columns);
  const int lane = static_cast<int>(threadIdx.x) % kLanes * kPerLane;
  LaneElements elements[kChunks];
#pragma unroll
  for (int j = 0; j < kChunks; ++j)
    elements[j] = load_elements(strips.part, begin + j * kChunk + lane);
  const auto left = [&](int64_t at, int most) {
    return static_cast<uint32_t>(numel - at < most ? numel - at : most);
  };
  MatrixPlace place(strips.part, begin);  // of the chunk's first element
  const int64_t of_all = one_scale(strips, place, left(begin, kStrip));
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    const int64_t chunk = begin + j * kChunk;
    if (chunk >= numel) return;
    const int64_t scale = of_all >= 0 ? of_all : one_scale(strips, place, left(chunk, kChunk));
    if (scale >= 0) {
      one(elements[j], chunk + lane, scale);
    } else {
      int64_t scales[kPerLane];
      MatrixPlace own = place;
      own.advance(static_cast<uint32_t>(lane), columns);
#pragma unroll
      for (int64_t& each : scales) {
        each = scale_at(strips.scales, own);
        own.advance(1, columns);
      }
      many(elements[j], chunk + lane, scales);
    }
    if (of_all < 0) place.advance(kChunk, columns);
  }
}

// --- amaxes --------------------------------------------------------------------------------------

// Most warps find a larger one there already and need no atomic, of which a matrix with one scale
// would have many in one place. (What they read may be old: it only grows.)
__device__ void combine_warp(uint32_t amax, int64_t index, uint32_t* amaxes) {
  const uint32_t largest = __reduce_max_sync(kAllLanes, amax);
  if (index >= 0 && threadIdx.x % kLanes == 0 &&
      largest > *static_cast<const volatile uint32_t*>(amaxes + index))
    atomicMax(amaxes + index, largest);
}

__global__ void __launch_bounds__(kThreads)
    amax_kernel(const __grid_constant__ Strips strips, uint32_t* amaxes) {
  uint32_t amax = 0;
  int64_t index = -1;  // of the scale that the whole warp is at
  for_each_chunk(
      strips,
      [&](const LaneElements& elements, int64_t, int64_t scale) {
        if (scale != index) {
          combine_warp(amax, index, amaxes);
          amax = 0;
          index = scale;
        }
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) amax = max(amax, magnitude_bits(elements.of[k]));
      },
      [&](const LaneElements& elements, int64_t, const int64_t(&scales)[kPerLane]) {
#pragma unroll
        for (int k = 0; k < kPerLane; ++k)
          if (k < elements.count) atomicMax(amaxes + scales[k], magnitude_bits(elements.of[k]));
      });
  combine_warp(amax, index, amaxes);
}

__global__ void factors_kernel(const uint32_t* amaxes, int64_t count, float* factors,
                               float* scales) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float factor = fp8_factor(__uint_as_float(amaxes[i]), kLeastWeightAmax);
  factors[i] = factor;
  scales[i] = fp8_scale(factor);
}

// --- codes ---------------------------------------------------------------------------------------

struct LaneCounts {
  int overflows = 0;
  int underflows = 0;

  __device__ void add(float value, float factor, uint8_t magnitude_code) {
    overflows += is_out_of_fp8(value, factor);
    underflows += magnitude_code == 0 && magnitude_bits(value) != 0;
  }

  // Stores the sum of a block's threads: one atomic for all.
  __device__ void store(QuantizeCounts* counts) const {
    __shared__ int of_block[2];
    if (threadIdx.x < 2) of_block[threadIdx.x] = 0;
    __syncthreads();
    const int of_warp[2] = {__reduce_add_sync(kAllLanes, overflows),
                            __reduce_add_sync(kAllLanes, underflows)};
    if (threadIdx.x % kLanes == 0) {
      if (of_warp[0] != 0) atomicAdd(&of_block[0], of_warp[0]);
      if (of_warp[1] != 0) atomicAdd(&of_block[1], of_warp[1]);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const auto add = [](int64_t* to, int number) {
      if (number != 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(to),
                  static_cast<unsigned long long>(number));
    };
    add(&counts->overflows, of_block[0]);
    add(&counts->underflows, of_block[1]);
  }
};

// The processor's conversion has the bits of fp8_code().
__device__ uint8_t device_fp8_code(float value, float factor) {
  return __nv_cvt_float_to_fp8(value * factor, __NV_SATFINITE, __NV_E4M3);
}

__device__ void store_codes(uint8_t* to, const uint8_t (&codes)[kPerLane], int count) {
  if (count == kPerLane && reinterpret_cast<uintptr_t>(to) % kPerLane == 0) {
    *reinterpret_cast<uchar4*>(to) = make_uchar4(codes[0], codes[1], codes[2], codes[3]);
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k)
      if (k < count) to[k] = codes[k];
  }
}

// factor_of(k): of the lane's element k.
template <typename FactorOf>
__device__ void quantize_elements(const LaneElements& elements, const FactorOf& factor_of,
                                  uint8_t* to, LaneCounts& counts) {
  uint8_t codes[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    if (k >= elements.count) continue;
    const float factor = factor_of(k);
    codes[k] = device_fp8_code(elements.of[k], factor);
    counts.add(elements.of[k], factor, codes[k] & 0x7F);
  }
  store_codes(to, codes, elements.count);
}

// fp32 scales, which the factors are of.
__global__ void __launch_bounds__(kThreads)
    fp8_kernel(const __grid_constant__ Strips strips, const float* factors, QuantizedPart into) {
  LaneCounts counts;
  for_each_chunk(
      strips,
      [&](const LaneElements& elements, int64_t at, int64_t scale) {
        const float factor = factors[scale];
        quantize_elements(
            elements, [&](int) { return factor; }, into.codes + at, counts);
      },
      [&](const LaneElements& elements, int64_t at, const int64_t(&scales)[kPerLane]) {
        quantize_elements(
            elements, [&](int k) { return factors[scales[k]]; }, into.codes + at, counts);
      });
  counts.store(into.counts);
}

// The largest magnitude among neighbouring lanes, a power of two of them. All lanes call it.
template <int kNeighbours>
__device__ float amax_of_neighbours(const LaneElements& elements) {
  uint32_t amax = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) amax = max(amax, magnitude_bits(elements.of[k]));
#pragma unroll
  for (int distance = 1; distance < kNeighbours; distance *= 2)
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
  return __uint_as_float(amax);
}

__global__ void __launch_bounds__(kThreads)
    mxfp8_kernel(const __grid_constant__ Strips strips, QuantizedPart into) {
  constexpr int kBlock = 32;
  const int64_t begin = strip_begin();
  const int64_t numel = strips.part.range.numel();
  LaneCounts counts;
  for (int64_t warp = begin; warp < numel && warp - begin < kStrip; warp += kChunk) {
    const int64_t at = warp + threadIdx.x % kLanes * kPerLane;
    const LaneElements elements = load_elements(strips.part, at);
    const uint8_t scale = e8m0_scale(amax_of_neighbours<kBlock / kPerLane>(elements));
    const float factor = inverse_of_e8m0(scale);
    uint8_t codes[kPerLane];
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      codes[k] = device_fp8_code(elements.of[k], factor);
      if (k < elements.count) counts.add(elements.of[k], factor, codes[k] & 0x7F);
    }
    store_codes(into.codes + at, codes, elements.count);
    if (at % kBlock == 0 && at < numel) into.block_scales[at / kBlock] = scale;
  }
  counts.store(into.counts);
}

unsigned num_blocks(int64_t numel) {
  constexpr int64_t kPerBlock = int64_t{kStrip} * (kThreads / kLanes);
  return static_cast<unsigned>((numel + kPerBlock - 1) / kPerBlock);
}

}  // namespace

void amax_on_device(const MatrixPart& part, const SharedScales& scales, uint32_t* amaxes,
                    void* stream) {
  if (part.range.empty()) return;
  amax_kernel<<<num_blocks(part.range.numel()), kThreads, 0, cuda_stream(stream)>>>({part, scales},
                                                                                    amaxes);
  check_launch("amax");
}

void factors_on_device(const uint32_t* amaxes, int64_t count, float* factors, float* scales,
                       void* stream) {
  if (count == 0) return;
  factors_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0,
                   cuda_stream(stream)>>>(amaxes, count, factors, scales);
  check_launch("factors");
}

void quantize_on_device(const MatrixPart& part, WeightRecipe recipe, const float* factors,
                        const QuantizedPart& into, void* stream) {
  if (part.range.empty()) return;
  const Strips strips{part, shared_scales(recipe, part.rows, part.columns)};
  const unsigned blocks = num_blocks(part.range.numel());
  const cudaStream_t on = cuda_stream(stream);
  if (recipe == WeightRecipe::kMxFp8)
    mxfp8_kernel<<<blocks, kThreads, 0, on>>>(strips, into);
  else
    fp8_kernel<<<blocks, kThreads, 0, on>>>(strips, factors, into);
  check_launch("quantize");
}

}  // namespace fsdp
