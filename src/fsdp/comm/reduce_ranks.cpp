#include "fsdp/comm/reduce_ranks.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

#include "fsdp/base/error.h"

// Tells the compiler that a loop's iterations do not depend on each other, though it cannot see it.
#if defined(__clang__)
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace fsdp {

namespace {

// A block of running values stays in the first-level cache while all ranks are added to it, so
// every input is read from memory once and the output written once.
constexpr int64_t kBlock = 2048;

// Between an element and the accumulation type. bf16 is written out in integer operations:
// libtorch's conversions are right too, but compilers do not vectorise them.
template <typename Acc, typename In>
Acc widened(In value) {
  return static_cast<Acc>(value);
}

template <>
inline float widened<float, c10::BFloat16>(c10::BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16);
}

template <typename Out, typename Acc>
Out rounded(Acc value) {
  return static_cast<Out>(value);
}

// To nearest, ties to even; NaN stays NaN (libtorch's bits for it: 0x7FC0).
template <>
inline c10::BFloat16 rounded<c10::BFloat16, float>(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t result = value != value ? 0x7FC0u : nearest;
  return c10::BFloat16(static_cast<uint16_t>(result), c10::BFloat16::from_bits());
}

struct Add {
  template <typename Acc>
  static Acc of(Acc a, Acc b) {
    return a + b;
  }
};

// A comparison with NaN is false, so a NaN on the left is kept and one on the right is taken.
struct Max {
  template <typename Acc>
  static Acc of(Acc a, Acc b) {
    return a >= b || a != a ? a : b;
  }
};

struct Min {
  template <typename Acc>
  static Acc of(Acc a, Acc b) {
    return a <= b || a != a ? a : b;
  }
};

// The passes over a block. Two ranks at a time: each pass reads and writes the running values once,
// and that, not the arithmetic, is its cost.
template <typename Acc, typename Wire>
void begin_with(Acc* __restrict acc, const Wire* __restrict a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) acc[i] = widened<Acc>(a[i]);
}

template <typename Op, typename Acc, typename Wire>
void begin_with(Acc* __restrict acc, const Wire* __restrict a, const Wire* __restrict b,
                int64_t count) {
  for (int64_t i = 0; i < count; ++i) acc[i] = Op::of(widened<Acc>(a[i]), widened<Acc>(b[i]));
}

template <typename Op, typename Acc, typename Wire>
void combine_with(Acc* __restrict acc, const Wire* __restrict a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) acc[i] = Op::of(acc[i], widened<Acc>(a[i]));
}

template <typename Op, typename Acc, typename Wire>
void combine_with(Acc* __restrict acc, const Wire* __restrict a, const Wire* __restrict b,
                  int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    acc[i] = Op::of(Op::of(acc[i], widened<Acc>(a[i])), widened<Acc>(b[i]));
}

// A factor of 1 changes no value.
template <typename Acc, typename Out>
void store(Out* __restrict out, const Acc* __restrict acc, Acc scale, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = rounded<Out>(static_cast<Acc>(acc[i] * scale));
}

// Two ranks need no running values: each element is read, combined and stored at once. `out` may be
// `a` or `b`, element by element, which is no dependence between iterations.
template <typename Op, typename Wire, typename Acc, typename Out>
void reduce_pair(const Wire* a, const Wire* b, Out* out, int64_t numel, Acc scale) {
  FSDP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < numel; ++i) {
    const Acc combined = Op::of(widened<Acc>(a[i]), widened<Acc>(b[i]));
    out[i] = rounded<Out>(static_cast<Acc>(combined * scale));
  }
}

template <typename Op, typename Wire, typename Acc, typename Out>
void reduce_by(std::span<const void* const> inputs, Out* output, int64_t numel, Acc scale) {
  if (inputs.size() == 2)
    return reduce_pair<Op, Wire>(static_cast<const Wire*>(inputs[0]),
                                 static_cast<const Wire*>(inputs[1]), output, numel, scale);
  std::array<Acc, kBlock> acc;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, numel - begin);
    const auto input = [&](size_t rank) { return static_cast<const Wire*>(inputs[rank]) + begin; };
    size_t rank = std::min<size_t>(2, inputs.size());
    if (rank == 1) {
      begin_with(acc.data(), input(0), count);
    } else {
      begin_with<Op>(acc.data(), input(0), input(1), count);
    }
    for (; rank + 2 <= inputs.size(); rank += 2)
      combine_with<Op>(acc.data(), input(rank), input(rank + 1), count);
    if (rank < inputs.size()) combine_with<Op>(acc.data(), input(rank), count);
    store(output + begin, acc.data(), scale, count);
  }
}

template <typename Wire, typename Acc, typename Out>
void reduce_typed(std::span<const void* const> inputs, Out* output, int64_t numel,
                  const Reduction& reduction) {
  const Acc scale = static_cast<Acc>(scale_of(reduction, inputs.size()));
  switch (reduction.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return reduce_by<Add, Wire>(inputs, output, numel, scale);
    case ReduceOp::kMax:
      return reduce_by<Max, Wire>(inputs, output, numel, scale);
    case ReduceOp::kMin:
      return reduce_by<Min, Wire>(inputs, output, numel, scale);
  }
}

// Calls body with a value of the C++ type behind a floating ScalarType.
template <typename Body>
void with_floating(at::ScalarType type, Body body) {
  if (type == at::kFloat) return body(float{});
  if (type == at::kDouble) return body(double{});
  if (type == at::kBFloat16) return body(c10::BFloat16{});
  if (type == at::kHalf) return body(c10::Half{});
  FSDP_ASSERT(false, "floating type ", c10::toString(type));
}

template <typename Body>
void with_integer(at::ScalarType type, Body body) {
  if (type == at::kLong) return body(int64_t{});
  if (type == at::kInt) return body(int32_t{});
  if (type == at::kByte) return body(uint8_t{});
  FSDP_ASSERT(false, "integer type ", c10::toString(type));
}

bool is_floating_wire(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

bool is_integer_wire(at::ScalarType type) {
  return type == at::kLong || type == at::kInt || type == at::kByte;
}

void reduce_floating(std::span<const void* const> inputs, void* output, int64_t numel,
                     const ReduceTypes& types, const Reduction& reduction) {
  with_floating(types.wire, [&](auto wire) {
    with_floating(types.result, [&](auto result) {
      using Wire = decltype(wire);
      using Out = decltype(result);
      // bf16 from fp16 wires (and the reverse) does not exist: checked_reduction allows the wire
      // type and the accumulation types only.
      if constexpr (std::is_same_v<Wire, Out> || std::is_same_v<Out, float> ||
                    std::is_same_v<Out, double>) {
        if (reduction.accumulate == at::kDouble) {
          reduce_typed<Wire, double>(inputs, static_cast<Out*>(output), numel, reduction);
        } else {
          reduce_typed<Wire, float>(inputs, static_cast<Out*>(output), numel, reduction);
        }
      }
    });
  });
}

}  // namespace

double scale_of(const Reduction& reduction, size_t ranks) {
  return reduction.op == ReduceOp::kAvg ? reduction.scale / static_cast<double>(ranks)
                                        : reduction.scale;
}

Reduction checked_reduction(const Reduction& reduction, const ReduceTypes& types,
                            std::string_view tag) {
  Reduction filled = reduction;
  if (is_integer_wire(types.wire)) {
    FSDP_CHECK(reduction.op != ReduceOp::kAvg && reduction.scale == 1.0, "reduction '", tag,
               "' of ", c10::toString(types.wire), " is ", name_of(reduction.op), " scaled by ",
               reduction.scale,
               ": whole numbers can be summed and compared, not averaged or scaled");
    FSDP_CHECK(types.result == types.wire && reduction.accumulate.value_or(at::kLong) == at::kLong,
               "reduction '", tag, "' of ", c10::toString(types.wire),
               ": whole numbers are reduced in int64 and stored in their own dtype");
    filled.accumulate = at::kLong;
    return filled;
  }
  FSDP_CHECK(
      is_floating_wire(types.wire), "reduction '", tag, "' has dtype ", c10::toString(types.wire),
      ", which can be moved but not reduced: use fp64, fp32, fp16, bf16, int64, int32 or uint8");
  const at::ScalarType widest = types.wire == at::kDouble ? at::kDouble : at::kFloat;
  filled.accumulate = reduction.accumulate.value_or(widest);
  FSDP_CHECK(filled.accumulate == at::kDouble || filled.accumulate == widest, "accumulate of '",
             tag, "' is ", c10::toString(*filled.accumulate), " for a wire type of ",
             c10::toString(types.wire), ": it must be fp32 or fp64 and not narrower than the wire");
  FSDP_CHECK(types.result == types.wire || types.result == *filled.accumulate, "output of '", tag,
             "' is ", c10::toString(types.result), ": it must be the wire type ",
             c10::toString(types.wire), " or the accumulation type ",
             c10::toString(*filled.accumulate));
  return filled;
}

void reduce_ranks(std::span<const void* const> inputs, void* output, int64_t numel,
                  const ReduceTypes& types, const Reduction& reduction) {
  if (is_floating_wire(types.wire)) return reduce_floating(inputs, output, numel, types, reduction);
  with_integer(types.wire, [&](auto wire) {
    using Wire = decltype(wire);
    reduce_typed<Wire, int64_t>(inputs, static_cast<Wire*>(output), numel, reduction);
  });
}

}  // namespace fsdp
