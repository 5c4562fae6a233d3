// The updates as CUDA kernels, compiled with -fmad=false for the same bits as on the host.
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/optim/kernels/adamw_vector.cuh"
#include "fsdp/optim/kernels/update_kernels.h"
#include "fsdp/optim/kernels/update_lane.cuh"
#include "fsdp/optim/kernels/update_math.h"

namespace fsdp {

namespace {

constexpr int kThreads = 256;

// --- the rules -----------------------------------------------------------------------------------

// The blocks of scales of one launch, counted from the first one that the span touches.
struct BlockRange {
  int64_t begin = 0;
  int64_t end = 0;
  int run = 1;  // how many neighbours a warp takes
};

struct BlockScales {
  float first;
  float second;
};

enum class Runs : uint8_t { kOfOne, kOfSeveral };

// Calls body(lane, scales of both moments) for every block of the range, with all lanes of a warp
// together. The body sets the new scales.
template <Blocks kBlocks, Runs kRuns, typename Body>
__device__ void for_each_block(const UpdateSpan& span, BlockRange range, const Body& body) {
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t first_begin = threadIdx.x % kWarp * kVector - span.flat_begin % kScaleBlock;
  if constexpr (kRuns == Runs::kOfOne) range.run = 1;
  for (int64_t run = range.begin + warp * range.run; run < range.end;
       run += num_warps * range.run) {
    const int64_t left = range.end - run;
    const int count = left < range.run ? static_cast<int>(left) : range.run;
    RunScales first(span.first, run, count);
    RunScales second(span.second, run, count);
    const auto update = [&](int k) {
      const int64_t begin = first_begin + (run + k) * kScaleBlock;
      const Lane<kBlocks> lane{.begin = begin,
                               .position = static_cast<uint32_t>(span.flat_begin + begin),
                               .numel = span.numel};
      BlockScales scales{first.of(k), second.of(k)};
      body(lane, scales);
      first.set(k, scales.first);
      second.set(k, scales.second);
    };
    if constexpr (kRuns == Runs::kOfOne) {
      update(0);
    } else {
#pragma unroll 1  // otherwise it takes more registers than there are
      for (int k = 0; k < count; ++k) update(k);
    }
    first.store();
    second.store();
  }
}

// Types known at compile time: the kernel needs no branches on them, and fewer registers.
template <DType kGradient, DType kWeight, MainWeight kMain>
struct KnownForm {
  static bool fits(const UpdateSpan& span) {
    return span.gradient_dtype == kGradient && span.weight_dtype == kWeight && span.main == kMain;
  }
  __device__ static void tell(UpdateSpan& span) {
    span.gradient_dtype = kGradient;
    span.weight_dtype = kWeight;
    span.main = kMain;
  }
};
struct AnyForm {
  static bool fits(const UpdateSpan&) { return true; }
  __device__ static void tell(UpdateSpan&) {}
};
template <DType kFirst, DType kSecond>
struct KnownMoments {
  static constexpr bool kHasScales = is_scaled(kFirst) || is_scaled(kSecond);
  static constexpr Runs kRuns = kHasScales ? Runs::kOfSeveral : Runs::kOfOne;
  // The loop over a run would take the registers of a fourth thread block.
  static constexpr int kMinThreadBlocks = kHasScales ? 4 : 0;
  __device__ static void tell(UpdateSpan& span) {
    span.first.dtype = kFirst;
    span.second.dtype = kSecond;
  }
};
struct AnyMoments {
  static constexpr Runs kRuns = Runs::kOfOne;
  static constexpr int kMinThreadBlocks = 0;
  __device__ static void tell(UpdateSpan&) {}
};

// The keys of a launch's random numbers: its range does not cross a multiple of 2^32 positions.
struct RandomKeys {
  RandomKey for_weight;
  RandomKey for_second;
};
__device__ RandomKeys random_keys(uint64_t seed, int64_t step, const UpdateSpan& span,
                                  BlockRange range) {
  const int64_t position = (span.flat_begin / kScaleBlock + range.begin) * kScaleBlock;
  const auto key = [&](RandomPurpose purpose) {
    return random_key(seed, step, span.group, purpose, position);
  };
  return {key(RandomPurpose::kWeight), key(RandomPurpose::kSecondMoment)};
}

// Numbers of all elements of a launch; computed once per thread block, since fp64 is slow on many
// devices.
struct AdamWShared {
  AdamWFactors by;
  bool has_plain_factors = false;
  RandomKeys keys;
};

template <typename Form, typename Moments, Blocks kBlocks, Marks kMarks>
__global__ void __launch_bounds__(kThreads, Moments::kMinThreadBlocks)
    adamw_kernel(UpdateSpan span, BlockRange range, AdamWRule rule, const StepState* state) {
  if (state->skips != 0) return;
  Form::tell(span);
  Moments::tell(span);
  __shared__ AdamWShared shared;
  if (threadIdx.x == 0) {
    shared.by = adamw_factors(rule, *state, span);
    shared.has_plain_factors = are_plain(shared.by);
    shared.keys = random_keys(rule.seed, state->step, span, range);
  }
  __syncthreads();
  const AdamWShared of_all = shared;
  for_each_block<kBlocks, Moments::kRuns>(
      span, range, [&](const Lane<kBlocks>& lane, BlockScales& scales) {
        const Raw raw_gradient = load_raw(span.gradient_dtype, span.gradient, lane);
        const RawWeight raw_weight = load_weight(span, lane);
        const Raw raw_first = load_raw(span.first.dtype, span.first.values, lane);
        const Raw raw_second = load_raw(span.second.dtype, span.second.values, lane);

        const AdamWVector updated = adamw_vector(
            of_all.by, of_all.has_plain_factors, widened(span.gradient_dtype, raw_gradient),
            main_weight(span, raw_weight), first_moment(span.first, raw_first, scales.first),
            second_moment(span.second, raw_second, scales.second));

        const Raw weight =
            store_weight(span, lane, updated.weight, rule.rounding, of_all.keys.for_weight);
        if constexpr (kMarks == Marks::kSet) mark_changed(span, lane, raw_weight, weight);
        scales.first = store_first(updated.first, span.first, lane);
        scales.second =
            store_second(updated.second, updated.roots, span.second, lane, of_all.keys.for_second);
      });
}

template <Momentum kMomentum, Blocks kBlocks, Marks kMarks>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(UpdateSpan span, BlockRange range, SgdRule rule, const StepState* state) {
  if (state->skips != 0) return;
  span.second.dtype = DType::kFloat32;  // no scales, like every absent moment
  if constexpr (kMomentum == Momentum::kNone) span.first.dtype = DType::kFloat32;
  __shared__ SgdFactors by;
  if (threadIdx.x == 0) by = sgd_factors(rule, *state, span.rate_scale, span.weight_decay);
  __syncthreads();
  const RandomKey key = random_keys(rule.seed, state->step, span, range).for_weight;
  for_each_block<kBlocks, Runs::kOfOne>(
      span, range, [&](const Lane<kBlocks>& lane, BlockScales& scales) {
        const Raw raw_gradient = load_raw(span.gradient_dtype, span.gradient, lane);
        const RawWeight raw_weight = load_weight(span, lane);
        Numbers buffer{};
        if constexpr (kMomentum != Momentum::kNone) {
          const Raw raw_buffer = load_raw(span.first.dtype, span.first.values, lane);
          buffer = first_moment(span.first, raw_buffer, scales.first);
        }
        const Numbers gradient = widened(span.gradient_dtype, raw_gradient);
        Numbers weight = main_weight(span, raw_weight);
#pragma unroll
        for (int k = 0; k < kVector; ++k)
          sgd_element<kMomentum>(by, gradient.of[k], weight.of[k], buffer.of[k]);
        const Raw bits = store_weight(span, lane, weight, rule.rounding, key);
        if constexpr (kMarks == Marks::kSet) mark_changed(span, lane, raw_weight, bits);
        if constexpr (kMomentum != Momentum::kNone)
          scales.first = store_first(measured(buffer), span.first, lane);
      });
}

__global__ void begin_step_kernel(StepState* state, StepRule rule) { begin_step(*state, rule); }

// --- launches ------------------------------------------------------------------------------------

// How many thread blocks of the kernel a device of this process runs at once.
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

// The first part of the range in which the upper half of positions does not change, so that random
// numbers have one key.
BlockRange range_of_one_key(const UpdateSpan& span, BlockRange range) {
  constexpr int64_t kBlocksOfKey = (int64_t{1} << 32) / kScaleBlock;
  const int64_t first_block = span.flat_begin / kScaleBlock;
  const int64_t end = ((first_block + range.begin) / kBlocksOfKey + 1) * kBlocksOfKey - first_block;
  return {.begin = range.begin, .end = end < range.end ? end : range.end};
}

// How many blocks in a row a warp takes if a run may have several: all warps get equally many runs,
// or one.
int run_length(int64_t num_blocks, int64_t num_warps) {
  const auto ceil_of = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t runs_of_warp = ceil_of(num_blocks, kMaxRun * num_warps);
  return static_cast<int>(ceil_of(num_blocks, runs_of_warp * num_warps));
}

// At most as many as run at once. Alone, an update with many short blocks is a little faster;
// beside the next forward it is slower, since each then runs on a part of the device
// (docs/optimizer.md).
template <auto kKernel, typename Rule>
void launch(const UpdateSpan& span, BlockRange range, const Rule& rule, const StepState* state,
            void* stream) {
  static const int at_once = blocks_at_once(kKernel);
  constexpr int64_t kPerBlock = kThreads / kWarp;
  while (range.begin < range.end) {
    BlockRange part = range_of_one_key(span, range);
    part.run = run_length(part.end - part.begin, at_once * kPerBlock);
    const int64_t wanted = (part.end - part.begin + kPerBlock - 1) / kPerBlock;
    const auto blocks = static_cast<unsigned>(wanted < at_once ? wanted : at_once);
    kKernel<<<blocks, kThreads, 0, cuda_stream(stream)>>>(span, part, rule, state);
    range.begin = part.end;
  }
}

// Whether a lane's numbers are aligned as one vector in every array.
bool has_vectors(const UpdateSpan& span) {
  const auto is_aligned = [&](const void* values, int64_t bytes) {
    const auto first = reinterpret_cast<uintptr_t>(values) -
                       static_cast<uintptr_t>(span.flat_begin % kVector * bytes);
    return values == nullptr || first % static_cast<uintptr_t>(kVector * bytes) == 0;
  };
  return is_aligned(span.gradient, element_bytes(span.gradient_dtype)) &&
         is_aligned(span.weight, element_bytes(span.weight_dtype)) &&
         is_aligned(span.main_weight, span.main == MainWeight::kSplit ? 2 : 4) &&
         is_aligned(span.first.values, element_bytes(span.first.dtype)) &&
         is_aligned(span.second.values, element_bytes(span.second.dtype));
}

// Launches whole(range) for the blocks in the middle, and cut(range) for those that the span's ends
// cut; cut(range) for all if vectors do not fit.
template <typename Whole, typename Cut>
void launch_parts(const UpdateSpan& span, const Whole& whole, const Cut& cut) {
  const int64_t end = span.flat_begin + span.numel;
  const int64_t first_block = span.flat_begin / kScaleBlock;
  const int64_t num_blocks = (end - 1) / kScaleBlock - first_block + 1;
  const BlockRange middle{.begin = span.flat_begin % kScaleBlock != 0 ? 1 : 0,
                          .end = num_blocks - (end % kScaleBlock != 0 ? 1 : 0)};
  if (middle.end <= middle.begin || !has_vectors(span)) return cut(BlockRange{0, num_blocks});
  if (middle.begin > 0) cut(BlockRange{0, middle.begin});
  whole(middle);
  if (middle.end < num_blocks) cut(BlockRange{middle.end, num_blocks});
}

// --- AdamW by types ------------------------------------------------------------------------------

constexpr DType kFp32 = DType::kFloat32;
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFp16 = DType::kFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3;
constexpr DType kE5M2 = DType::kFloat8E5M2;

template <Marks kMarks>
struct AdamWLaunch {
  const UpdateSpan& span;
  BlockRange range;
  const AdamWRule& rule;
  const StepState* state;
  void* stream;

  template <typename Form, typename Moments>
  void run() const {
    launch<adamw_kernel<Form, Moments, Blocks::kWhole, kMarks>>(span, range, rule, state, stream);
  }

  template <typename Moments, typename... Forms>
  void run_first_that_fits() const {
    (void)((Forms::fits(span) && (run<Forms, Moments>(), true)) || ...);
  }

  // Every pair of moments has a kernel. Common pairs have one for every usual form of weights; the
  // others test the form at run time.
  template <DType kFirst, DType kSecond>
  void with_moments() const {
    using Moments = KnownMoments<kFirst, kSecond>;
    constexpr bool kIsUsual =
        (kFirst == kSecond && kFirst != kE5M2) || (kFirst == kE4M3 && kSecond == kBf16);
    if constexpr (kIsUsual) {
      run_first_that_fits<Moments, KnownForm<kFp32, kFp32, MainWeight::kIsWeight>,
                          KnownForm<kFp32, kBf16, MainWeight::kSplit>,
                          KnownForm<kBf16, kBf16, MainWeight::kSplit>,
                          KnownForm<kBf16, kBf16, MainWeight::kIsWeight>, AnyForm>();
    } else {
      run<AnyForm, Moments>();
    }
  }

  template <DType kFirst>
  void with_first() const {
    if (span.second.dtype == kFp32) with_moments<kFirst, kFp32>();
    if (span.second.dtype == kBf16) with_moments<kFirst, kBf16>();
    if (span.second.dtype == kFp16) with_moments<kFirst, kFp16>();
    if (span.second.dtype == kE4M3) with_moments<kFirst, kE4M3>();
    if (span.second.dtype == kE5M2) with_moments<kFirst, kE5M2>();
  }

  void run() const {
    if (span.first.dtype == kFp32) with_first<kFp32>();
    if (span.first.dtype == kBf16) with_first<kBf16>();
    if (span.first.dtype == kFp16) with_first<kFp16>();
    if (span.first.dtype == kE4M3) with_first<kE4M3>();
    if (span.first.dtype == kE5M2) with_first<kE5M2>();
  }
};

template <Momentum kMomentum, Marks kMarks>
void launch_sgd(const UpdateSpan& span, const SgdRule& rule, const StepState* state, void* stream) {
  launch_parts(
      span,
      [&](BlockRange range) {
        launch<sgd_kernel<kMomentum, Blocks::kWhole, kMarks>>(span, range, rule, state, stream);
      },
      [&](BlockRange range) {
        launch<sgd_kernel<kMomentum, Blocks::kCut, kMarks>>(span, range, rule, state, stream);
      });
}

template <Marks kMarks>
void launch_sgd(const UpdateSpan& span, const SgdRule& rule, const StepState* state, void* stream) {
  switch (momentum_kind(rule)) {
    case Momentum::kNone:
      launch_sgd<Momentum::kNone, kMarks>(span, rule, state, stream);
      break;
    case Momentum::kPlain:
      launch_sgd<Momentum::kPlain, kMarks>(span, rule, state, stream);
      break;
    case Momentum::kNesterov:
      launch_sgd<Momentum::kNesterov, kMarks>(span, rule, state, stream);
      break;
  }
}

template <Marks kMarks>
void launch_adamw(const UpdateSpan& span, const AdamWRule& rule, const StepState* state,
                  void* stream) {
  launch_parts(
      span,
      [&](BlockRange range) {
        AdamWLaunch<kMarks>{span, range, rule, state, stream}.run();
      },
      [&](BlockRange range) {
        launch<adamw_kernel<AnyForm, AnyMoments, Blocks::kCut, kMarks>>(span, range, rule, state,
                                                                        stream);
      });
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
  span.marks == nullptr ? launch_adamw<Marks::kNone>(span, rule, state, stream)
                        : launch_adamw<Marks::kSet>(span, rule, state, stream);
  check_launch("adamw");
}

void sgd_on_device(const UpdateSpan& span, const SgdRule& rule, const StepState* state,
                   void* stream) {
  if (span.numel == 0) return;
  span.marks == nullptr ? launch_sgd<Marks::kNone>(span, rule, state, stream)
                        : launch_sgd<Marks::kSet>(span, rule, state, stream);
  check_launch("sgd");
}

}  // namespace fsdp
