// How kernels read and write numbers: 16 bytes at once where addresses allow it, as fp32 in
// registers whatever their type in memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "fsdp/base/check.h"
#include "fsdp/base/dtype.h"

namespace fsdp {

// Numbers that are loaded or stored by one instruction.
template <typename T, int kCountValue>
struct alignas(sizeof(T) * kCountValue) Pack {
  static constexpr int kCount = kCountValue;
  T of[kCount];
};

inline constexpr int kPackBytes = 16;
template <typename T>
inline constexpr int kPackCount = kPackBytes / static_cast<int>(sizeof(T));

template <int kCount>
struct Floats {
  float of[kCount];
};

__device__ inline float widened(float value) { return value; }
__device__ inline float widened(__half value) { return __half2float(value); }
__device__ inline float widened(__nv_bfloat16 value) { return __bfloat162float(value); }

// To nearest.
template <typename T>
__device__ T rounded(float value) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(value);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(value);
  if constexpr (std::is_same_v<T, float>) return value;
}

template <typename T, int kCount>
__device__ Floats<kCount> widened(const Pack<T, kCount>& pack) {
  Floats<kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) result.of[i] = widened(pack.of[i]);
  return result;
}

template <int kCount, typename T>
__device__ Floats<kCount> load_pack(const T* from) {
  // A copy: through a reference to memory its numbers would be loaded one by one.
  const Pack<T, kCount> pack = *reinterpret_cast<const Pack<T, kCount>*>(from);
  return widened(pack);
}

// A whole pack as it is in memory, for what is looked at later: four registers.
template <typename T>
struct RawPack {
  uint4 words;
};

template <typename T>
__device__ RawPack<T> load_raw_pack(const T* from) {
  return {*reinterpret_cast<const uint4*>(from)};
}

template <typename T>
__device__ Floats<kPackCount<T>> widened(const RawPack<T>& raw) {
  Pack<T, kPackCount<T>> pack;
  memcpy(&pack, &raw, sizeof(pack));
  return widened(pack);
}

template <int kCount, typename T>
__device__ void store_pack(T* to, const Floats<kCount>& values) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.of[i] = rounded<T>(values.of[i]);
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

// --- on the host ---------------------------------------------------------------------------------

// Whether packs may begin at this address.
inline bool begins_a_pack(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kPackBytes == 0;
}

// Calls function(T{}) with the kernels' type.
template <typename Function>
void with_kernel_type(DType dtype, const char* kernel, const Function& function) {
  FSDP_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16,
             "the kernel '", kernel, "' was asked for ", name_of(dtype),
             ": use fp32, bf16 or fp16");
  if (dtype == DType::kFloat32) function(float{});
  if (dtype == DType::kBFloat16) function(__nv_bfloat16{});
  if (dtype == DType::kFloat16) function(__half{});
}

}  // namespace fsdp
