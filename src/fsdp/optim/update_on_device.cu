// The updates as CUDA kernels. A warp works on one block of scales at a time, four elements per
// lane, and shares nothing with others. Compiled with -fmad=false: the same bits as on the host.
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/narrow_float.h"
#include "fsdp/optim/adamw_math.h"
#include "fsdp/optim/begin_step.h"
#include "fsdp/optim/counter_random.h"
#include "fsdp/optim/moment_code.h"
#include "fsdp/optim/sgd_math.h"
#include "fsdp/optim/split_weight.h"
#include "fsdp/optim/update_on_device.h"

namespace fsdp {

namespace {

constexpr int kWarp = 32;
constexpr int kPerLane = static_cast<int>(kScaleBlock) / kWarp;
static_assert(kPerLane * kWarp == kScaleBlock);
constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// What a lane works on: elements `lane`, `lane` + 32, ... of a block of scales, so that a warp's
// loads lie side by side however the span is aligned.
struct Lane {
  int64_t begin;     // of this lane's first element in the span; may lie before it
  int64_t position;  // of the same, in the group's whole buffer
  int64_t scale;     // index of the block's scale
  int64_t numel;     // of the span

  __device__ int64_t index(int k) const { return begin + k * kWarp; }
  __device__ bool has(int k) const { return index(k) >= 0 && index(k) < numel; }
};

// --- numbers of a lane ---------------------------------------------------------------------------

// Loaded as they are, all of a lane's numbers before the first is looked at: so many loads are in
// flight at once.
struct Raw {
  uint32_t bits[kPerLane];
};

template <typename Word>
__device__ Raw load_words(const void* values, const Lane& lane) {
  Raw raw;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    raw.bits[k] = 0;
    if (lane.has(k)) raw.bits[k] = static_cast<const Word*>(values)[lane.index(k)];
  }
  return raw;
}

__device__ Raw load_raw(DType dtype, const void* values, const Lane& lane) {
  if (dtype == DType::kFloat32) return load_words<uint32_t>(values, lane);
  if (dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2)
    return load_words<uint8_t>(values, lane);
  return load_words<uint16_t>(values, lane);
}

struct Numbers {
  float of[kPerLane];
};

template <typename Function>
__device__ Numbers each(const Function& function) {
  Numbers numbers;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) numbers.of[k] = function(k);
  return numbers;
}

template <typename Narrow>
__device__ Numbers widened(const Raw& raw) {
  using Code = typename Narrow::Code;
  return each([&](int k) { return Narrow::widened(static_cast<Code>(raw.bits[k])); });
}

__device__ Numbers widened(DType dtype, const Raw& raw) {
  if (dtype == DType::kBFloat16) return widened<Bf16>(raw);
  if (dtype == DType::kFloat16) return widened<Fp16>(raw);
  if (dtype == DType::kFloat8E4M3) return widened<Fp8E4M3>(raw);
  if (dtype == DType::kFloat8E5M2) return widened<Fp8E5M2>(raw);
  return each([&](int k) { return std::bit_cast<float>(raw.bits[k]); });
}

// Stores code(k) wherever the lane has an element.
template <typename Word, typename Function>
__device__ void store_each(void* values, const Lane& lane, const Function& code) {
#pragma unroll
  for (int k = 0; k < kPerLane; ++k)
    if (lane.has(k)) static_cast<Word*>(values)[lane.index(k)] = static_cast<Word>(code(k));
}

// --- weights -------------------------------------------------------------------------------------

struct RawWeight {
  Raw weight;
  Raw main;
};

__device__ RawWeight load_weight(const UpdateSpan& span, const Lane& lane) {
  RawWeight raw;
  if (span.main != MainWeight::kSeparate)
    raw.weight = load_raw(span.weight_dtype, span.weight, lane);
  if (span.main == MainWeight::kSeparate) raw.main = load_words<uint32_t>(span.main_weight, lane);
  if (span.main == MainWeight::kSplit) raw.main = load_words<uint16_t>(span.main_weight, lane);
  return raw;
}

__device__ Numbers main_weight(const UpdateSpan& span, const RawWeight& raw) {
  if (span.main == MainWeight::kSeparate)
    return each([&](int k) { return std::bit_cast<float>(raw.main.bits[k]); });
  if (span.main == MainWeight::kSplit)
    return each([&](int k) {
      return join_weight({.upper = static_cast<uint16_t>(raw.weight.bits[k]),
                          .remainder = static_cast<int16_t>(raw.main.bits[k])});
    });
  return widened(span.weight_dtype, raw.weight);
}

__device__ void store_rounded(const UpdateSpan& span, const Lane& lane, const Numbers& values,
                              Rounding rounding, RandomKey key) {
  const bool is_bf16 = span.weight_dtype == DType::kBFloat16;
  if (rounding == Rounding::kNearest) {
    store_each<uint16_t>(span.weight, lane, [&](int k) {
      return is_bf16 ? Bf16::nearest(values.of[k]) : Fp16::nearest(values.of[k]);
    });
    return;
  }
  store_each<uint16_t>(span.weight, lane, [&](int k) {
    const uint32_t random = random_bits(key, static_cast<uint32_t>(lane.position + k * kWarp));
    return is_bf16 ? Bf16::stochastic(values.of[k], random)
                   : Fp16::stochastic(values.of[k], random);
  });
}

__device__ void store_weight(const UpdateSpan& span, const Lane& lane, const Numbers& values,
                             Rounding rounding, RandomKey key) {
  const auto wide = [&](int k) { return values.of[k]; };
  const auto upper = [&](int k) { return rounded_away(values.of[k]); };
  if (span.main == MainWeight::kSplit) {
    store_each<uint16_t>(span.weight, lane, upper);
    store_each<int16_t>(span.main_weight, lane,
                        [&](int k) { return split_weight(values.of[k]).remainder; });
    return;
  }
  if (span.main == MainWeight::kSeparate) store_each<float>(span.main_weight, lane, wide);
  if (span.weight_dtype == DType::kFloat32) {
    store_each<float>(span.weight, lane, wide);
  } else if (span.main == MainWeight::kIsWeight) {
    store_rounded(span, lane, values, rounding, key);
  } else if (span.weight_dtype == DType::kBFloat16) {
    store_each<uint16_t>(span.weight, lane, upper);
  } else {
    store_each<uint16_t>(span.weight, lane, [&](int k) { return Fp16::nearest(values.of[k]); });
  }
}

// --- moments -------------------------------------------------------------------------------------

__device__ float load_scale(const Moment& moment, const Lane& lane) {
  return is_scaled(moment.dtype) ? moment.scales[lane.scale] : 1.0f;
}

__device__ Numbers first_moment(const Moment& moment, const Raw& raw, float scale) {
  const Numbers values = widened(moment.dtype, raw);
  return each([&](int k) { return values.of[k] * scale; });
}

__device__ Numbers second_moment(const Moment& moment, const Raw& raw, float scale) {
  const Numbers values = first_moment(moment, raw, scale);
  if (!is_scaled(moment.dtype)) return values;
  return each([&](int k) { return values.of[k] * values.of[k]; });
}

// Of all lanes that have an element; they hold one block's numbers together. Sets its scale.
template <typename Narrow>
__device__ float shared_scale(const Numbers& values, const Moment& moment, const Lane& lane) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k)
    if (lane.has(k)) largest = max(largest, magnitude_bits(values.of[k]));
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  const float scale = block_scale<Narrow>(largest);
  if (threadIdx.x % kWarp == 0) moment.scales[lane.scale] = scale;
  return scale;
}

template <typename Narrow>
__device__ void store_scaled(const Numbers& values, const Moment& moment, const Lane& lane) {
  const float inverse = inverse_scale(shared_scale<Narrow>(values, moment, lane));
  store_each<typename Narrow::Code>(moment.values, lane,
                                    [&](int k) { return Narrow::nearest(values.of[k] * inverse); });
}

template <typename Narrow>
__device__ void store_roots(const Numbers& values, const Moment& moment, const Lane& lane,
                            RandomKey key) {
  const Numbers roots = each([&](int k) { return sqrtf(values.of[k]); });
  const float inverse = inverse_scale(shared_scale<Narrow>(roots, moment, lane));
  store_each<typename Narrow::Code>(moment.values, lane, [&](int k) {
    const uint32_t random = random_bits(key, static_cast<uint32_t>(lane.position + k * kWarp));
    return root_code<Narrow>(roots.of[k] * inverse, random);
  });
}

__device__ void store_first(const Numbers& values, const Moment& moment, const Lane& lane) {
  if (moment.dtype == DType::kBFloat16) {
    store_each<uint16_t>(moment.values, lane, [&](int k) { return Bf16::nearest(values.of[k]); });
  } else if (moment.dtype == DType::kFloat16) {
    store_scaled<Fp16>(values, moment, lane);
  } else if (moment.dtype == DType::kFloat8E4M3) {
    store_scaled<Fp8E4M3>(values, moment, lane);
  } else if (moment.dtype == DType::kFloat8E5M2) {
    store_scaled<Fp8E5M2>(values, moment, lane);
  } else {
    store_each<float>(moment.values, lane, [&](int k) { return values.of[k]; });
  }
}

__device__ void store_second(const Numbers& values, const Moment& moment, const Lane& lane,
                             RandomKey key) {
  if (moment.dtype == DType::kBFloat16) {
    store_each<uint16_t>(moment.values, lane, [&](int k) {
      const uint32_t random = random_bits(key, static_cast<uint32_t>(lane.position + k * kWarp));
      return Bf16::stochastic(values.of[k], random);
    });
  } else if (moment.dtype == DType::kFloat16) {
    store_roots<Fp16>(values, moment, lane, key);
  } else if (moment.dtype == DType::kFloat8E4M3) {
    store_roots<Fp8E4M3>(values, moment, lane, key);
  } else if (moment.dtype == DType::kFloat8E5M2) {
    store_roots<Fp8E5M2>(values, moment, lane, key);
  } else {
    store_each<float>(moment.values, lane, [&](int k) { return values.of[k]; });
  }
}

// --- the rules -----------------------------------------------------------------------------------

// Calls body(lane) for every block of scales that the span touches; all lanes of a warp together.
template <typename Body>
__device__ void for_each_block(const UpdateSpan& span, const Body& body) {
  const int64_t first_block = span.flat_begin / kScaleBlock;
  const int64_t num_blocks = (span.flat_begin + span.numel - 1) / kScaleBlock - first_block + 1;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  for (int64_t block = warp; block < num_blocks; block += num_warps) {
    const int64_t position = (first_block + block) * kScaleBlock + threadIdx.x % kWarp;
    body(Lane{.begin = position - span.flat_begin,
              .position = position,
              .scale = block,
              .numel = span.numel});
  }
}

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(UpdateSpan span, AdamWRule rule, const StepState* state) {
  if (state->skips != 0) return;
  // fp64 is slow on many devices: once per thread block.
  __shared__ AdamWFactors by;
  if (threadIdx.x == 0) by = adamw_factors(rule, *state, span.rate_scale, span.weight_decay);
  __syncthreads();
  const int64_t step = state->step;
  for_each_block(span, [&](const Lane& lane) {
    const Raw raw_gradient = load_raw(span.gradient_dtype, span.gradient, lane);
    const RawWeight raw_weight = load_weight(span, lane);
    const Raw raw_first = load_raw(span.first.dtype, span.first.values, lane);
    const Raw raw_second = load_raw(span.second.dtype, span.second.values, lane);
    const float first_scale = load_scale(span.first, lane);
    const float second_scale = load_scale(span.second, lane);

    const Numbers gradient = widened(span.gradient_dtype, raw_gradient);
    Numbers weight = main_weight(span, raw_weight);
    Numbers first = first_moment(span.first, raw_first, first_scale);
    Numbers second = second_moment(span.second, raw_second, second_scale);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k)
      adamw_element(by, gradient.of[k], weight.of[k], first.of[k], second.of[k]);

    const auto key = [&](RandomPurpose purpose) {
      return random_key(rule.seed, step, span.group, purpose, lane.position);
    };
    store_weight(span, lane, weight, rule.rounding, key(RandomPurpose::kWeight));
    store_first(first, span.first, lane);
    store_second(second, span.second, lane, key(RandomPurpose::kSecondMoment));
  });
}

template <Momentum kMomentum>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(UpdateSpan span, SgdRule rule, const StepState* state) {
  if (state->skips != 0) return;
  __shared__ SgdFactors by;
  if (threadIdx.x == 0) by = sgd_factors(rule, *state, span.rate_scale, span.weight_decay);
  __syncthreads();
  const int64_t step = state->step;
  for_each_block(span, [&](const Lane& lane) {
    const Raw raw_gradient = load_raw(span.gradient_dtype, span.gradient, lane);
    const RawWeight raw_weight = load_weight(span, lane);
    Numbers buffer{};
    if constexpr (kMomentum != Momentum::kNone) {
      const Raw raw_buffer = load_raw(span.first.dtype, span.first.values, lane);
      buffer = first_moment(span.first, raw_buffer, load_scale(span.first, lane));
    }
    const Numbers gradient = widened(span.gradient_dtype, raw_gradient);
    Numbers weight = main_weight(span, raw_weight);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k)
      sgd_element<kMomentum>(by, gradient.of[k], weight.of[k], buffer.of[k]);
    const RandomKey key =
        random_key(rule.seed, step, span.group, RandomPurpose::kWeight, lane.position);
    store_weight(span, lane, weight, rule.rounding, key);
    if constexpr (kMomentum != Momentum::kNone) store_first(buffer, span.first, lane);
  });
}

__global__ void begin_step_kernel(StepState* state, StepRule rule) { begin_step(*state, rule); }

// --- launches ------------------------------------------------------------------------------------

// Thread blocks of the kernel that a device of this process runs at once.
template <typename Kernel>
int blocks_at_once(Kernel kernel) {
  int device = 0;
  int multiprocessors = 0;
  int per_multiprocessor = 0;
  check_call(cudaGetDevice(&device), "cudaGetDevice");
  check_call(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_call(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kThreads, 0),
      "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return multiprocessors * per_multiprocessor;
}

// No more than run at once: each has factors to compute first, and a second wave that does not fill
// the device would leave the rest of it idle.
template <auto kKernel>
int blocks_for(const UpdateSpan& span) {
  static const int at_once = blocks_at_once(kKernel);
  const int64_t touched = span.numel / kScaleBlock + 2;
  const int64_t per_block = kThreads / kWarp;
  const int64_t blocks = (touched + per_block - 1) / per_block;
  return static_cast<int>(blocks < at_once ? blocks : at_once);
}

template <Momentum kMomentum>
void launch_sgd(const UpdateSpan& span, const SgdRule& rule, const StepState* state, void* stream) {
  const int blocks = blocks_for<sgd_kernel<kMomentum>>(span);
  sgd_kernel<kMomentum><<<blocks, kThreads, 0, cuda_stream(stream)>>>(span, rule, state);
}

}  // namespace

bool has_device_updates() { return true; }

void begin_step_on_device(StepState* state, const StepRule& rule, void* stream) {
  begin_step_kernel<<<1, 1, 0, cuda_stream(stream)>>>(state, rule);
  check_launch("begin_step");
}

void adamw_on_device(const UpdateSpan& span, const AdamWRule& rule, const StepState* state,
                     void* stream) {
  if (span.numel == 0) return;
  adamw_kernel<<<blocks_for<adamw_kernel>(span), kThreads, 0, cuda_stream(stream)>>>(span, rule,
                                                                                     state);
  check_launch("adamw");
}

void sgd_on_device(const UpdateSpan& span, const SgdRule& rule, const StepState* state,
                   void* stream) {
  if (span.numel == 0) return;
  switch (momentum_kind(rule)) {
    case Momentum::kNone:
      launch_sgd<Momentum::kNone>(span, rule, state, stream);
      break;
    case Momentum::kPlain:
      launch_sgd<Momentum::kPlain>(span, rule, state, stream);
      break;
    case Momentum::kNesterov:
      launch_sgd<Momentum::kNesterov>(span, rule, state, stream);
      break;
  }
  check_launch("sgd");
}

}  // namespace fsdp
