// Packing as a CUDA kernel. Tensors are cut into chunks of equal length, a thread block each, so
// that long and short ones share the device evenly.
#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/narrow_vector.cuh"
#include "fsdp/shard/group/pack_on_device.h"

namespace fsdp {

namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // vectors that a thread moves, so that many loads are in flight
constexpr int64_t kTile = int64_t{kThreads} * kVector * kAtOnce;
constexpr int64_t kChunk = 4 * kTile;  // starting a block takes as long as a tile
constexpr int kMaxListed = 96;

// A kernel's argument, copied at its launch: at most 4 KB.
struct PackList {
  const void* from[kMaxListed];
  void* to[kMaxListed];
  int64_t numel[kMaxListed];
  int32_t end_chunk[kMaxListed];  // chunks up to the end of this tensor
  DType from_dtype[kMaxListed];
  bool adds[kMaxListed];
  int32_t count;
};
static_assert(sizeof(PackList) <= 4000);

// Packs a thread block's part of one tensor.
template <typename From, typename To, bool kAdds>
struct Chunk {
  using FromCode = typename From::Code;
  using ToCode = typename To::Code;

  const FromCode* from;
  ToCode* to;
  int64_t numel;

  __device__ void pack() const {
    const bool are_vectors = reinterpret_cast<uintptr_t>(from) % sizeof(Vector<FromCode>) == 0 &&
                             reinterpret_cast<uintptr_t>(to) % sizeof(Vector<ToCode>) == 0;
    const int64_t end = are_vectors ? numel / kVector * kVector : 0;
    for (int64_t tile = 0; tile < end; tile += kTile) pack_tile(tile + threadIdx.x * kVector, end);
    for (int64_t i = end + threadIdx.x; i < numel; i += kThreads) pack_one(i);
  }

  __device__ void pack_tile(int64_t first, int64_t end) const {
    const auto each_vector = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (const int64_t at = first + i * kThreads * kVector; at < end) body(i, at);
    };
    Vector<FromCode> codes[kAtOnce];
    Vector<ToCode> before[kAtOnce];
    each_vector([&](int i, int64_t at) {
      codes[i] = *reinterpret_cast<const Vector<FromCode>*>(from + at);
      if constexpr (kAdds) before[i] = *reinterpret_cast<const Vector<ToCode>*>(to + at);
    });
    each_vector([&](int i, int64_t at) {
      Numbers values = widened<From>(codes[i]);
      if constexpr (kAdds) {
        const Numbers added = values;
        const Numbers old = widened<To>(before[i]);
        values = each([&](int k) { return old.of[k] + added.of[k]; });
      }
      *reinterpret_cast<Vector<ToCode>*>(to + at) = nearest<To>(values);
    });
  }

  __device__ void pack_one(int64_t i) const {
    float value = From::widened(from[i]);
    if constexpr (kAdds) value = To::widened(to[i]) + value;
    to[i] = To::nearest(value);
  }
};

template <typename From, typename To>
__device__ void pack_chunk(const PackList& list, int tensor, int64_t begin) {
  const auto* from = static_cast<const typename From::Code*>(list.from[tensor]) + begin;
  auto* to = static_cast<typename To::Code*>(list.to[tensor]) + begin;
  const int64_t numel = min(kChunk, list.numel[tensor] - begin);
  if (list.adds[tensor]) {
    Chunk<From, To, true>{from, to, numel}.pack();
  } else {
    Chunk<From, To, false>{from, to, numel}.pack();
  }
}

template <typename To>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackList list) {
  const auto chunk = static_cast<int32_t>(blockIdx.x);
  int tensor = 0;
  for (int beyond = list.count - 1; tensor < beyond;) {
    const int middle = (tensor + beyond) / 2;
    if (chunk < list.end_chunk[middle]) {
      beyond = middle;
    } else {
      tensor = middle + 1;
    }
  }
  const int32_t first = tensor == 0 ? 0 : list.end_chunk[tensor - 1];
  const int64_t begin = (chunk - first) * kChunk;
  const DType from = list.from_dtype[tensor];
  if (from == DType::kFloat32) pack_chunk<Fp32, To>(list, tensor, begin);
  if (from == DType::kBFloat16) pack_chunk<Bf16, To>(list, tensor, begin);
  if (from == DType::kFloat16) pack_chunk<Fp16, To>(list, tensor, begin);
}

void launch(const PackList& list, DType to, void* stream) {
  const auto blocks = static_cast<unsigned>(list.end_chunk[list.count - 1]);
  const auto start = [&](auto kernel) {
    kernel<<<blocks, kThreads, 0, cuda_stream(stream)>>>(list);
  };
  if (to == DType::kFloat32) start(pack_kernel<Fp32>);
  if (to == DType::kBFloat16) start(pack_kernel<Bf16>);
  if (to == DType::kFloat16) start(pack_kernel<Fp16>);
  check_launch("pack");
}

}  // namespace

bool has_device_packs() { return true; }

bool is_packed_on_device(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

void pack_on_device(std::span<const PackedTensor> tensors, DType to_dtype, void* stream) {
  PackList list{.count = 0};
  const auto flush = [&] {
    if (list.count > 0) launch(list, to_dtype, stream);
    list.count = 0;
  };
  FSDP_ASSERT(is_packed_on_device(to_dtype));
  for (const PackedTensor& tensor : tensors) {
    FSDP_ASSERT(is_packed_on_device(tensor.from_dtype));
    if (tensor.numel == 0) continue;
    if (list.count == kMaxListed) flush();
    const int i = list.count++;
    list.from[i] = tensor.from;
    list.to[i] = tensor.to;
    list.numel[i] = tensor.numel;
    list.from_dtype[i] = tensor.from_dtype;
    list.adds[i] = tensor.adds;
    list.end_chunk[i] = static_cast<int32_t>((i == 0 ? 0 : list.end_chunk[i - 1]) +
                                             (tensor.numel + kChunk - 1) / kChunk);
  }
  flush();
}

}  // namespace fsdp
