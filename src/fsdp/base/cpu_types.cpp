#include "fsdp/base/cpu_types.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fsdp {

namespace {

#if defined(__aarch64__)

// From the kernel's asm/hwcap.h, which old headers lack: bf16.
constexpr unsigned long kBFloat16 = 1UL << 14;

// libtorch's fp16 products are slow even where there are instructions for them (Neoverse-N1 has).
CpuTypes detect() {
  return {.has_bfloat16 = (::getauxval(AT_HWCAP2) & kBFloat16) != 0, .has_float16 = false};
}

#elif defined(__x86_64__)

// Where there is AVX-512, oneDNN widens bf16 as it reads it, instructions for it or not. fp16 needs
// its own, for which compilers have had a name only since lately.
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
