// Words for the compiler beyond the language: where a function runs, what is inlined, which
// loops may be vectorised.
#pragma once

// Marks functions that run on hosts and on devices: the same source, the same bits.
#if defined(__CUDACC__)
#define FSDP_HOST_DEVICE __host__ __device__
#else
#define FSDP_HOST_DEVICE
#endif

// A loop of constant bounds in such a function, whose indices a kernel's compiler is to know.
#if defined(__CUDACC__)
#define FSDP_UNROLLED _Pragma("unroll")
#else
#define FSDP_UNROLLED
#endif

// For functions of loops that are compiled for several instruction sets, or whose operands must not
// leave their registers.
#define FSDP_INLINED [[gnu::always_inline]] inline

// Tells the compiler that a loop's iterations do not depend on each other, though it cannot see it.
#if defined(__clang__)
// Unrolling a short loop first would leave nothing to vectorise.
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety) unroll(disable)")
// A loop that stays scalar all the same is slower, not wrong.
#pragma clang diagnostic ignored "-Wpass-failed"
#else
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
