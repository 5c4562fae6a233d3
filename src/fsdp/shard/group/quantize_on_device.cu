// Quantising as CUDA kernels. A warp goes through a strip of neighbouring elements, 128 of them at
// once: four for each lane.
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
constexpr int kPerWarp = kLanes * kPerLane;
constexpr int kStrip = 16 * kPerWarp;  // so that few warps combine their results with others
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
    for (int k = 0; k < elements.count; ++k) elements.of[k] = part.values[at + k];
  }
  return elements;
}

// Where a lane is in the matrix; divides once, then counts.
struct MatrixPlace {
  int64_t row;
  int64_t column;

  __device__ MatrixPlace(const MatrixPart& part, int64_t at)
      : row((part.range.begin + at) / part.columns),
        column((part.range.begin + at) % part.columns) {}

  __device__ void advance(int count, int64_t columns) {
    column += count;
    while (column >= columns) {
      column -= columns;
      ++row;
    }
  }
};

// The scales of a lane's elements: nearly always one for all.
struct LaneScales {
  int64_t of[kPerLane];
  bool are_one;

  __device__ LaneScales(const Strips& strips, MatrixPlace place) {
    of[0] = strips.scales.index_of(place.row, place.column);
    are_one = true;
#pragma unroll
    for (int k = 1; k < kPerLane; ++k) {
      place.advance(1, strips.part.columns);
      of[k] = strips.scales.index_of(place.row, place.column);
      are_one &= of[k] == of[0];
    }
  }
};

__device__ int64_t strip_begin() {
  return (int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes) * kStrip;
}

// --- amaxes --------------------------------------------------------------------------------------

__device__ void combine_warp(uint32_t amax, int64_t index, uint32_t* amaxes) {
  const uint32_t largest = __reduce_max_sync(kAllLanes, amax);
  if (index >= 0 && threadIdx.x % kLanes == 0) atomicMax(amaxes + index, largest);
}

__global__ void __launch_bounds__(kThreads)
    amax_kernel(const __grid_constant__ Strips strips, uint32_t* amaxes) {
  const int64_t begin = strip_begin();
  const int64_t first = begin + threadIdx.x % kLanes * kPerLane;
  MatrixPlace place(strips.part, first);
  uint32_t amax = 0;
  int64_t index = -1;  // of the scale that the whole warp is at
  for (int64_t at = first; at - first + begin < strips.part.range.numel() && at - first < kStrip;
       at += kPerWarp) {
    const LaneElements elements = load_elements(strips.part, at);
    const LaneScales scales(strips, place);
    place.advance(kPerWarp, strips.part.columns);
    const int64_t of_warp = __shfl_sync(kAllLanes, scales.of[0], 0);
    const bool is_alike = elements.count == 0 || (scales.are_one && scales.of[0] == of_warp);
    if (__all_sync(kAllLanes, is_alike)) {
      if (of_warp != index) {
        combine_warp(amax, index, amaxes);
        amax = 0;
        index = of_warp;
      }
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) amax = max(amax, magnitude_bits(elements.of[k]));
    } else {
      for (int k = 0; k < elements.count; ++k)
        atomicMax(amaxes + scales.of[k], magnitude_bits(elements.of[k]));
    }
  }
  combine_warp(amax, index, amaxes);
}

__global__ void factors_kernel(WeightRecipe recipe, const uint32_t* amaxes, int64_t count,
                               float* factors, float* scales) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float amax = __uint_as_float(amaxes[i]);
  const float factor =
      recipe == WeightRecipe::kNvFp4 ? nvfp4_matrix_factor(amax) : fp8_factor(amax);
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

  __device__ void store(QuantizeCounts* counts) const {
    const int all_overflows = __reduce_add_sync(kAllLanes, overflows);
    const int all_underflows = __reduce_add_sync(kAllLanes, underflows);
    if (threadIdx.x % kLanes != 0) return;
    const auto add = [](int64_t* to, int number) {
      if (number != 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(to),
                  static_cast<unsigned long long>(number));
    };
    add(&counts->overflows, all_overflows);
    add(&counts->underflows, all_underflows);
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
    for (int k = 0; k < count; ++k) to[k] = codes[k];
  }
}

// fp32 scales, which the factors are of.
__global__ void __launch_bounds__(kThreads)
    fp8_kernel(const __grid_constant__ Strips strips, const float* factors, QuantizedPart into) {
  const int64_t first = strip_begin() + threadIdx.x % kLanes * kPerLane;
  MatrixPlace place(strips.part, first);
  LaneCounts counts;
  for (int64_t at = first; at < strips.part.range.numel() && at - first < kStrip; at += kPerWarp) {
    const LaneElements elements = load_elements(strips.part, at);
    const LaneScales scales(strips, place);
    place.advance(kPerWarp, strips.part.columns);
    uint8_t codes[kPerLane];
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (k >= elements.count) continue;
      const float factor = factors[scales.of[k]];
      codes[k] = device_fp8_code(elements.of[k], factor);
      counts.add(elements.of[k], factor, codes[k] & 0x7F);
    }
    store_codes(into.codes + at, codes, elements.count);
  }
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
  for (int64_t warp = begin; warp < numel && warp - begin < kStrip; warp += kPerWarp) {
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

__global__ void __launch_bounds__(kThreads)
    nvfp4_kernel(const __grid_constant__ Strips strips, const float* factors, QuantizedPart into) {
  constexpr int kBlock = 16;
  const int64_t begin = strip_begin();
  const int64_t numel = strips.part.range.numel();
  const float matrix_factor = factors[0];
  LaneCounts counts;
  for (int64_t warp = begin; warp < numel && warp - begin < kStrip; warp += kPerWarp) {
    const int64_t at = warp + threadIdx.x % kLanes * kPerLane;
    const LaneElements elements = load_elements(strips.part, at);
    const uint8_t scale =
        nvfp4_block_scale(amax_of_neighbours<kBlock / kPerLane>(elements), matrix_factor);
    const float factor = nvfp4_factor(scale, matrix_factor);
    uint8_t codes[kPerLane];
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      codes[k] = e2m1_code(elements.of[k] * factor);
      if (k < elements.count) counts.add(elements.of[k], 0.0f, codes[k] & 7);
    }
    if (at >= numel) continue;  // parts end between blocks
    *reinterpret_cast<uchar2*>(into.codes + at / 2) =
        make_uchar2(static_cast<unsigned char>(codes[0] | codes[1] << 4),
                    static_cast<unsigned char>(codes[2] | codes[3] << 4));
    if (at % kBlock == 0) into.block_scales[at / kBlock] = scale;
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

void factors_on_device(WeightRecipe recipe, const uint32_t* amaxes, int64_t count, float* factors,
                       float* scales, void* stream) {
  if (count == 0) return;
  factors_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0,
                   cuda_stream(stream)>>>(recipe, amaxes, count, factors, scales);
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
  else if (recipe == WeightRecipe::kNvFp4)
    nvfp4_kernel<<<blocks, kThreads, 0, on>>>(strips, factors, into);
  else
    fp8_kernel<<<blocks, kThreads, 0, on>>>(strips, factors, into);
  check_launch("quantize");
}

}  // namespace fsdp
