// The element types a buffer can have, known without torch, and which of them this machine's CPU
// computes with quickly.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fsdp {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt64,
  kInt32,
  kUInt8,
};

// Bytes per element.
int64_t element_bytes(DType dtype);

// "fp32", "bf16", "fp8_e4m3", ...
std::string_view name_of(DType dtype);

// The inverse of name_of; nullopt for an unknown name.
std::optional<DType> parse_dtype(std::string_view name);

// Every value, in declaration order.
std::span<const DType> all_dtypes();

bool is_floating(DType dtype);

// Which narrow types libtorch multiplies quickly on a CPU.
struct CpuTypes {
  bool has_bfloat16 = false;
  bool has_float16 = false;
};

// Facts about this machine's CPU, which is asked once. Machines that are neither x86-64 nor aarch64
// have none.
CpuTypes this_cpu();

// Whether products of this type are about as fast there as fp32 ones.
bool is_quick_on(const CpuTypes& cpu, DType dtype);

}  // namespace fsdp
