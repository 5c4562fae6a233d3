// Tells the compiler that a loop's iterations do not depend on each other, though it cannot see it.
#pragma once

#if defined(__clang__)
// Unrolling a short loop first would leave nothing to vectorise.
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety) unroll(disable)")
// A loop that stays scalar all the same is slower, not wrong.
#pragma clang diagnostic ignored "-Wpass-failed"
#else
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
