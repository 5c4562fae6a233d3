#include "fsdp/base/dtype.h"

#include <array>

#include "fsdp/base/check.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fsdp {

namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int64_t bytes;
  bool floating;
};

constexpr std::array<Row, 9> kTable = {{
    {DType::kFloat64, "fp64", 8, true},
    {DType::kFloat32, "fp32", 4, true},
    {DType::kFloat16, "fp16", 2, true},
    {DType::kBFloat16, "bf16", 2, true},
    {DType::kFloat8E4M3, "fp8_e4m3", 1, true},
    {DType::kFloat8E5M2, "fp8_e5m2", 1, true},
    {DType::kInt64, "int64", 8, false},
    {DType::kInt32, "int32", 4, false},
    {DType::kUInt8, "uint8", 1, false},
}};

const Row& row_of(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  FSDP_ASSERT(index < kTable.size() && kTable[index].dtype == dtype, "dtype ", index);
  return kTable[index];
}

#if defined(__aarch64__)

// From the kernel's asm/hwcap.h, which old headers lack: bf16.
constexpr unsigned long kBFloat16 = 1UL << 14;

// libtorch's fp16 products are slow even where there are instructions for them (Neoverse-N1 has).
CpuTypes detect() {
  return {.has_bfloat16 = (::getauxval(AT_HWCAP2) & kBFloat16) != 0, .has_float16 = false};
}

#elif defined(__x86_64__)

// With AVX-512, oneDNN widens bf16 while it reads, with or without instructions for bf16. fp16
// needs instructions of its own, which only recent compilers can name, so their bit is read here.
CpuTypes detect() {
  const bool has_avx512 = __builtin_cpu_supports("avx512bw") != 0 &&
                          __builtin_cpu_supports("avx512vl") != 0 &&
                          __builtin_cpu_supports("avx512dq") != 0;
  constexpr unsigned kLeaf = 7;
  constexpr unsigned kFloat16 = 1U << 23;  // in EDX: avx512_fp16
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  const bool is_known = __get_cpuid_count(kLeaf, 0, &a, &b, &c, &d) != 0;
  return {.has_bfloat16 = has_avx512, .has_float16 = has_avx512 && is_known && (d & kFloat16) != 0};
}

#else

CpuTypes detect() { return {}; }

#endif

}  // namespace

int64_t element_bytes(DType dtype) { return row_of(dtype).bytes; }

std::string_view name_of(DType dtype) { return row_of(dtype).name; }

std::optional<DType> parse_dtype(std::string_view name) {
  for (const Row& row : kTable)
    if (row.name == name) return row.dtype;
  return std::nullopt;
}

std::span<const DType> all_dtypes() {
  static constexpr auto kAll = [] {
    std::array<DType, kTable.size()> all{};
    for (size_t i = 0; i < kTable.size(); ++i) all[i] = kTable[i].dtype;
    return all;
  }();
  return kAll;
}

bool is_floating(DType dtype) { return row_of(dtype).floating; }

CpuTypes this_cpu() {
  static const CpuTypes found = detect();
  return found;
}

bool is_quick_on(const CpuTypes& cpu, DType dtype) {
  if (dtype == DType::kBFloat16) return cpu.has_bfloat16;
  if (dtype == DType::kFloat16) return cpu.has_float16;
  return true;
}

}  // namespace fsdp
