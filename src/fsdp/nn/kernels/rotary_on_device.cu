// Rotary positions of queries and keys in one launch: every number is read once and written once.
#include "fsdp/base/check.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

constexpr int kMaxThreads = 256;
constexpr int kWarp = 32;

// A position has `num_items` items: pairs of packs, those of its queries first. A position takes
// one or several thread blocks.
struct Rotation {
  std::array<RotatedHeads, 2> heads;
  RotationAngles angles;
  unsigned sequence;
  unsigned half;  // of head_dim
  unsigned packs_per_half;
  unsigned num_items;
  unsigned blocks_per_position;
};

template <typename T, int kCount>
__global__ void __launch_bounds__(kMaxThreads) rotate_kernel(__grid_constant__ const Rotation r) {
  const unsigned position = blockIdx.x / r.blocks_per_position;
  unsigned item = (blockIdx.x % r.blocks_per_position) * blockDim.x + threadIdx.x;
  if (item >= r.num_items) return;
  const unsigned in_sequence = position % r.sequence;
  const unsigned num_query_items = static_cast<unsigned>(r.heads[0].num_heads) * r.packs_per_half;
  const bool is_key = item >= num_query_items;
  if (is_key) item -= num_query_items;
  const RotatedHeads& x = is_key ? r.heads[1] : r.heads[0];
  const unsigned head = item / r.packs_per_half;
  const unsigned channel = item % r.packs_per_half * kCount;

  const T* from = static_cast<const T*>(x.from) + position / r.sequence * x.strides[0] +
                  in_sequence * x.strides[1] + head * x.strides[2] + channel;
  T* to = static_cast<T*>(x.to) + (position * x.num_heads + head) * (2 * r.half) + channel;
  const Floats<kCount> a = load_pack<kCount>(from);
  const Floats<kCount> b = load_pack<kCount>(from + r.half);
  const int64_t angle = position / r.sequence * r.angles.batch_stride +
                        static_cast<int64_t>(in_sequence) * r.half + channel;
  const Floats<kCount> cosine = load_pack<kCount>(r.angles.cosine + angle);
  const Floats<kCount> sine = load_pack<kCount>(r.angles.sine + angle);
  Floats<kCount> first;
  Floats<kCount> second;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float s = r.angles.sign * sine.of[k];
    first.of[k] = a.of[k] * cosine.of[k] - b.of[k] * s;
    second.of[k] = b.of[k] * cosine.of[k] + a.of[k] * s;
  }
  store_pack(to, first);
  store_pack(to + r.half, second);
}

bool fit_packs(const RotatedHeads& heads, int count) {
  bool fit = begins_a_pack(heads.from) && begins_a_pack(heads.to);
  for (const int64_t stride : heads.strides) fit = fit && stride % count == 0;
  return fit;
}

// Angles of a pack of narrow numbers are longer than a pack, but are loaded at once, too.
bool fit_packs(const RotationAngles& angles, int count) {
  const auto begins = [&](const float* address) {
    return reinterpret_cast<uintptr_t>(address) % (sizeof(float) * count) == 0;
  };
  return begins(angles.cosine) && begins(angles.sine) && angles.batch_stride % count == 0;
}

}  // namespace

void rotate_on_device(const std::array<RotatedHeads, 2>& heads, const RotationShape& shape,
                      const RotationAngles& angles, void* stream) {
  const int64_t num_positions = shape.batch * shape.sequence;
  const int64_t num_heads = heads[0].num_heads + heads[1].num_heads;
  if (num_positions * num_heads * shape.head_dim == 0) return;
  with_kernel_type(shape.dtype, "rotate", [&](auto zero) {
    using T = decltype(zero);
    const int64_t half = shape.head_dim / 2;
    const bool packed = half % kPackCount<T> == 0 && fit_packs(heads[0], kPackCount<T>) &&
                        fit_packs(heads[1], kPackCount<T>) && fit_packs(angles, kPackCount<T>);
    const int64_t packs_per_half = packed ? half / kPackCount<T> : half;
    const int64_t num_items = num_heads * packs_per_half;
    const int64_t threads =
        num_items < kMaxThreads ? (num_items + kWarp - 1) / kWarp * kWarp : kMaxThreads;
    const int64_t blocks = (num_items + threads - 1) / threads;
    FSDP_CHECK(num_positions * blocks <= INT32_MAX, "rotary positions of ", num_positions,
               " tokens were asked for at once; this is more than a launch can have");
    const Rotation rotation{.heads = heads,
                            .angles = angles,
                            .sequence = static_cast<unsigned>(shape.sequence),
                            .half = static_cast<unsigned>(half),
                            .packs_per_half = static_cast<unsigned>(packs_per_half),
                            .num_items = static_cast<unsigned>(num_items),
                            .blocks_per_position = static_cast<unsigned>(blocks)};
    const auto kernel = packed ? rotate_kernel<T, kPackCount<T>> : rotate_kernel<T, 1>;
    kernel<<<static_cast<unsigned>(num_positions * blocks), static_cast<unsigned>(threads), 0,
             cuda_stream(stream)>>>(rotation);
  });
  check_launch("rotate");
}

}  // namespace fsdp::nn
