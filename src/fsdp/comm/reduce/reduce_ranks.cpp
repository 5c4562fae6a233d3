#include "fsdp/comm/reduce/reduce_ranks.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>

#include "fsdp/base/check.h"
#include "fsdp/base/compiler.h"

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

// A conversion from fp64 goes through fp32. To round only once, the first step must not round to
// nearest: an inexact value goes to the neighbour whose last bit is 1, which lies on the right side
// of every tie of the second step.
inline float rounded_to_odd(double value) {
  const auto near = static_cast<float>(value);
  const double back = near;
  const auto bits = std::bit_cast<uint32_t>(near);
  const bool too_small = std::abs(back) < std::abs(value);
  // A neighbour of an even number is odd; magnitudes are ordered like their bits. (NaN is not equal
  // to itself and stays NaN, with another last bit; below the smallest fp32 lies 0, with its sign.)
  const uint32_t neighbour = too_small ? bits + 1 : bits - 1;
  const bool is_odd = (bits & 1u) != 0;
  return std::bit_cast<float>(back == value || is_odd ? bits : neighbour);
}

// The bits of the nearest bf16, ties to even, in the upper half; the lower half is noise. NaN stays
// NaN (libtorch's bits for it: 0x7FC0).
inline uint32_t rounded_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t nearest = bits + 0x7FFFu + ((bits >> 16) & 1u);
  // Not `? :`, from which compilers make branches when more is done with the result.
  const uint32_t nan_mask = -static_cast<uint32_t>(value != value);
  return (nearest & ~nan_mask) | (0x7FC00000u & nan_mask);
}

// Rounds and stores. Returns what was stored, which need not be finite: rounding can overflow.
template <typename Out, typename Acc>
Acc store_rounded(Out& place, Acc value) {
  if constexpr (std::is_same_v<Acc, double> && sizeof(Out) == 2) {
    return store_rounded(place, rounded_to_odd(value));
  } else if constexpr (std::is_same_v<Out, c10::BFloat16>) {
    const uint32_t bits = rounded_to_bf16(value);
    place = c10::BFloat16(static_cast<uint16_t>(bits >> 16), c10::BFloat16::from_bits());
    return std::bit_cast<float>(bits & 0xFFFF0000u);
  } else {
    const auto stored = static_cast<Out>(value);
    place = stored;
    return static_cast<Acc>(stored);
  }
}

// Stored values are watched for these.
enum class Look : uint8_t { kAway, kForNonfinite, kForSquares };

// The findings about values that were stored.
struct Seen {
  bool suspect = false;  // one of them may be NaN or Inf
  double squares = 0;    // the sum of their squares, if asked for; right unless suspect

  Seen& operator+=(const Seen& other) {
    suspect |= other.suspect;
    squares += other.squares;
    return *this;
  }
};

// How many sums run side by side. Two vectors of them hide an addition's latency. Where elements
// are widened or narrowed, which cores do on one of their units, a longer body keeps the other
// units busy (5 % of such a pass on a Neoverse-N1).
template <typename In, typename Out>
constexpr int64_t kSums = sizeof(In) == 2 || sizeof(Out) == 2 ? 32 : 8;

// One of the sums adds up this many squares in fp32; then in fp64.
constexpr int64_t kSquaresPerSum = 128;

// sum + value * value. The square of a bf16 number fits into fp32 (down to 1e-40), so a fused
// operation gives the same bits as two where it is exact, and takes the time of one.
template <bool kIsExact>
inline float plus_square(float sum, float value) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  if constexpr (kIsExact) return std::fma(value, value, sum);
#endif
  return sum + value * value;
}

template <bool kIsExact>
inline double plus_square(double sum, double value) {
  return sum + value * value;
}

// Calls store(i), which stores element i and returns what it stored, for i from begin to end; no
// iteration depends on another. The sum of values of which one is not finite is not finite, so one
// addition per value finds them all, without a branch; values whose sum overflows are suspected
// wrongly.
template <Look kLook, typename Out, int64_t kNumSums, typename StoreOne>
Seen store_and_sum(int64_t begin, int64_t end, StoreOne store) {
  using Acc = decltype(store(begin));
  const auto watch = [](Acc sum, Acc value) {
    if constexpr (kLook == Look::kForSquares)
      return plus_square<std::is_same_v<Out, c10::BFloat16>>(sum, value);
    return sum + value;
  };
  std::array<Acc, kNumSums> sums{};
  for (; begin + kNumSums <= end; begin += kNumSums) {
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t lane = 0; lane < kNumSums; ++lane) {
      Acc& sum = sums[static_cast<size_t>(lane)];
      sum = watch(sum, store(begin + lane));
    }
  }
  for (; begin < end; ++begin) sums[0] = watch(sums[0], store(begin));
  const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
  return {.suspect = !std::isfinite(sum), .squares = sum};
}

// Stores i from 0 to numel, looking only for what kLook names.
template <Look kLook, typename Out, int64_t kNumSums, typename StoreOne>
Seen store_each(int64_t numel, StoreOne store) {
  if constexpr (kLook == Look::kAway) {
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < numel; ++i) store(i);
    return {};
  } else if constexpr (kLook == Look::kForNonfinite) {
    return {.suspect = store_and_sum<kLook, Out, kNumSums>(0, numel, store).suspect};
  } else {
    constexpr int64_t kStride = kSquaresPerSum * kNumSums;
    Seen seen;
    for (int64_t begin = 0; begin < numel; begin += kStride)
      seen += store_and_sum<kLook, Out, kNumSums>(begin, std::min(begin + kStride, numel), store);
    return seen;
  }
}

// Looks at every stored value again, for when a sum overflowed and raised a false suspicion.
template <typename Out>
Seen seen_again(const Out* values, int64_t numel) {
  Seen seen;
  for (int64_t i = 0; i < numel; ++i) {
    const auto value = static_cast<double>(values[i]);
    seen.suspect |= !std::isfinite(value);
    seen.squares += value * value;
  }
  return seen;
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

// Stores at an element. A factor of 1 changes no value.
template <Store kStore, typename Out, typename Acc>
Acc store_one(Out& place, Acc combined, Acc scale) {
  Acc result = combined * scale;
  if constexpr (kStore == Store::kAdd) result = widened<Acc>(place) + result;
  return store_rounded(place, result);
}

// --- one rank and two --------------------------------------------------------------------------

// These need no running values: each element is read, combined and stored at once. `out` may be one
// of the inputs, element by element, which is no dependence between iterations.
template <Store kStore, Look kLook, typename Wire, typename Acc, typename Out>
Seen store_single(const Wire* a, Out* out, int64_t numel, Acc scale) {
  return store_each<kLook, Out, kSums<Wire, Out>>(
      numel, [=](int64_t i) { return store_one<kStore>(out[i], widened<Acc>(a[i]), scale); });
}

template <Store kStore, Look kLook, typename Wire, typename Acc, typename Out>
Seen store_sum(const Wire* a, const Wire* b, Out* out, int64_t numel, Acc scale) {
  return store_each<kLook, Out, kSums<Wire, Out>>(numel, [=](int64_t i) {
    return store_one<kStore>(out[i], widened<Acc>(a[i]) + widened<Acc>(b[i]), scale);
  });
}

// --- any number of ranks -----------------------------------------------------------------------

// The passes over a block. As many ranks at a time as the order allows: each pass reads or writes
// running values once, and that, not the arithmetic, is its cost.
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
void begin_with(Acc* __restrict acc, const Wire* __restrict a, const Wire* __restrict b,
                const Wire* __restrict c, const Wire* __restrict d, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    acc[i] = Op::of(Op::of(widened<Acc>(a[i]), widened<Acc>(b[i])),
                    Op::of(widened<Acc>(c[i]), widened<Acc>(d[i])));
}

template <typename Op, typename Acc, typename Wire>
void combine_with(Acc* __restrict acc, const Wire* __restrict a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) acc[i] = Op::of(acc[i], widened<Acc>(a[i]));
}

// acc = elements begin .. begin + count of these ranks, combined as SumOrder says.
template <typename Op, typename Wire, typename Acc>
void combine_block(std::span<const void* const> inputs, size_t group, int64_t begin, int64_t count,
                   Acc* acc) {
  const auto input = [&](size_t rank) { return static_cast<const Wire*>(inputs[rank]) + begin; };
  const size_t num_ranks = inputs.size();
  if (group == num_ranks) group = 1;
  if (num_ranks == 1) return begin_with(acc, input(0), count);
  if (num_ranks == 2) return begin_with<Op>(acc, input(0), input(1), count);
  if (num_ranks == 4) return begin_with<Op>(acc, input(0), input(1), input(2), input(3), count);
  const size_t left = SumOrder::left_of(num_ranks / group) * group;
  combine_block<Op, Wire>(inputs.first(left), group, begin, count, acc);
  if (left + 1 == num_ranks) return combine_with<Op>(acc, input(left), count);
  std::array<Acc, kBlock> right;
  combine_block<Op, Wire>(inputs.subspan(left), group, begin, count, right.data());
  combine_with<Op>(acc, static_cast<const Acc*>(right.data()), count);
}

template <Store kStore, Look kLook, typename Out, typename Acc>
Seen store_block(const Acc* acc, Acc scale, void* output, int64_t begin, int64_t count) {
  Out* out = static_cast<Out*>(output) + begin;
  return store_each<kLook, Out, kSums<Acc, Out>>(
      count, [=](int64_t i) { return store_one<kStore>(out[i], acc[i], scale); });
}

// Wire type and operation matter to the first half alone, output type and store to the second: two
// pointers keep the number of compiled loops a sum instead of a product.
template <typename Acc>
struct BlockPasses {
  void (*combine)(std::span<const void* const> inputs, size_t group, int64_t begin, int64_t count,
                  Acc* acc);
  Seen (*store)(const Acc* acc, Acc scale, void* output, int64_t begin, int64_t count);
};

template <typename Acc>
Seen reduce_blocks(const ReduceRange& range, const BlockPasses<Acc>& passes, Acc scale) {
  std::array<Acc, kBlock> acc;
  Seen seen;
  const size_t group = range.group == 0 ? range.inputs.size() : range.group;
  for (int64_t begin = 0; begin < range.numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, range.numel - begin);
    passes.combine(range.inputs, group, begin, count, acc.data());
    seen += passes.store(acc.data(), scale, range.output, begin, count);
  }
  return seen;
}

// --- choosing the loops ------------------------------------------------------------------------

template <typename Wire, typename Acc>
auto combine_pass(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return &combine_block<Add, Wire, Acc>;
    case ReduceOp::kMax:
      return &combine_block<Max, Wire, Acc>;
    case ReduceOp::kMin:
      return &combine_block<Min, Wire, Acc>;
  }
  FSDP_ASSERT(false, "reduction ", static_cast<int>(op));
}

// Calls body with a value of the C++ type behind a floating ScalarType.
template <typename Body>
auto with_floating(at::ScalarType type, Body body) {
  if (type == at::kFloat) return body(float{});
  if (type == at::kDouble) return body(double{});
  if (type == at::kBFloat16) return body(c10::BFloat16{});
  if (type == at::kHalf) return body(c10::Half{});
  FSDP_ASSERT(false, "floating type ", c10::toString(type));
}

template <typename Body>
auto with_integer(at::ScalarType type, Body body) {
  if (type == at::kLong) return body(int64_t{});
  if (type == at::kInt) return body(int32_t{});
  if (type == at::kByte) return body(uint8_t{});
  FSDP_ASSERT(false, "integer type ", c10::toString(type));
}

// Calls body with the two as constants.
template <typename Body>
Seen with_store(Store store, Look look, Body body) {
  const auto with_look = [&](auto store_kind) {
    if (look == Look::kAway) return body(store_kind, std::integral_constant<Look, Look::kAway>{});
    if (look == Look::kForSquares)
      return body(store_kind, std::integral_constant<Look, Look::kForSquares>{});
    return body(store_kind, std::integral_constant<Look, Look::kForNonfinite>{});
  };
  if (store == Store::kAdd) return with_look(std::integral_constant<Store, Store::kAdd>{});
  return with_look(std::integral_constant<Store, Store::kWrite>{});
}

template <typename Wire, typename Acc, typename Out>
Seen reduce_typed(const ReduceRange& range, const Reduction& reduction, Look look) {
  const bool sums = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAvg;
  const Acc scale = static_cast<Acc>(scale_of(reduction, range.inputs.size()));
  return with_store(reduction.store, look, [&](auto store_kind, auto look_kind) {
    constexpr Store kStore = decltype(store_kind)::value;
    constexpr Look kLook = decltype(look_kind)::value;
    // Worth loops of their own for the types in which gradients are summed.
    if constexpr (std::is_same_v<Acc, float> || std::is_same_v<Wire, Out>) {
      const auto input = [&](size_t rank) { return static_cast<const Wire*>(range.inputs[rank]); };
      auto* out = static_cast<Out*>(range.output);
      if (range.inputs.size() == 1)
        return store_single<kStore, kLook>(input(0), out, range.numel, scale);
      if (range.inputs.size() == 2 && sums)
        return store_sum<kStore, kLook>(input(0), input(1), out, range.numel, scale);
    }
    const BlockPasses<Acc> passes{combine_pass<Wire, Acc>(reduction.op),
                                  &store_block<kStore, kLook, Out, Acc>};
    return reduce_blocks(range, passes, scale);
  });
}

// Returns what `look` asks for, without false suspicions.
template <typename Acc>
Seen reduce_floating(const ReduceRange& range, const Reduction& reduction, Look look) {
  return with_floating(range.types.wire, [&](auto wire) {
    return with_floating(range.types.result, [&](auto result) {
      using Wire = decltype(wire);
      using Out = decltype(result);
      // fp64 on either side is accumulated in fp64 (checked_reduction).
      constexpr bool kHasDouble = std::is_same_v<Wire, double> || std::is_same_v<Out, double>;
      if constexpr (kHasDouble && std::is_same_v<Acc, float>) {
        FSDP_ASSERT(false, "fp64 accumulated in fp32");
        return Seen();
      } else {
        const Seen seen = reduce_typed<Wire, Acc, Out>(range, reduction, look);
        return seen.suspect ? seen_again(static_cast<const Out*>(range.output), range.numel) : seen;
      }
    });
  });
}

void reduce_integers(const ReduceRange& range, const Reduction& reduction) {
  with_integer(range.types.wire, [&](auto wire) {
    using Wire = decltype(wire);
    const BlockPasses<int64_t> passes{combine_pass<Wire, int64_t>(reduction.op),
                                      &store_block<Store::kWrite, Look::kAway, Wire, int64_t>};
    reduce_blocks(range, passes, int64_t{1});
  });
}

bool is_floating_wire(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

bool is_integer_wire(at::ScalarType type) {
  return type == at::kLong || type == at::kInt || type == at::kByte;
}

Reduction checked_integers(const Reduction& reduction, const ReduceTypes& types,
                           std::string_view tag) {
  FSDP_CHECK(reduction.op != ReduceOp::kAvg && reduction.scale == 1.0, "reduction '", tag, "' of ",
             c10::toString(types.wire), " is ", name_of(reduction.op), " scaled by ",
             reduction.scale, ": whole numbers can be summed and compared, not averaged or scaled");
  FSDP_CHECK(types.result == types.wire && reduction.accumulate.value_or(at::kLong) == at::kLong,
             "reduction '", tag, "' of ", c10::toString(types.wire),
             ": whole numbers are reduced in int64 and stored in their own dtype");
  FSDP_CHECK(reduction.store == Store::kWrite, "store of '", tag, "' is add for ",
             c10::toString(types.wire), ": only floating sums and averages can be added to");
  Reduction filled = reduction;
  filled.accumulate = at::kLong;
  return filled;
}

}  // namespace

double scale_of(const Reduction& reduction, size_t ranks) {
  return reduction.op == ReduceOp::kAvg ? reduction.scale / static_cast<double>(ranks)
                                        : reduction.scale;
}

at::ScalarType type_between_hops(const Reduction& reduction, at::ScalarType wire) {
  return is_integer_wire(wire) ? wire : *reduction.accumulate;
}

ReductionHops hops_of(const Reduction& reduction, size_t ranks) {
  const ReduceOp op = reduction.op == ReduceOp::kAvg ? ReduceOp::kSum : reduction.op;
  ReductionHops hops{.within_group = {.op = op, .accumulate = reduction.accumulate},
                     .across_groups = reduction};
  hops.across_groups.op = op;
  hops.across_groups.scale = scale_of(reduction, ranks);
  return hops;
}

Reduction checked_reduction(const Reduction& reduction, const ReduceTypes& types,
                            std::string_view tag) {
  if (is_integer_wire(types.wire)) return checked_integers(reduction, types, tag);
  FSDP_CHECK(
      is_floating_wire(types.wire), "reduction '", tag, "' has dtype ", c10::toString(types.wire),
      ", which can be moved but not reduced: use fp64, fp32, fp16, bf16, int64, int32 or uint8");
  FSDP_CHECK(is_floating_wire(types.result), "output of '", tag, "' is ",
             c10::toString(types.result), " for a wire type of ", c10::toString(types.wire),
             ": it must be fp64, fp32, fp16 or bf16");
  const bool has_double = types.wire == at::kDouble || types.result == at::kDouble;
  const at::ScalarType widest = has_double ? at::kDouble : at::kFloat;
  Reduction filled = reduction;
  filled.accumulate = reduction.accumulate.value_or(widest);
  FSDP_CHECK(filled.accumulate == at::kDouble || filled.accumulate == widest, "accumulate of '",
             tag, "' is ", c10::toString(*filled.accumulate), " from ", c10::toString(types.wire),
             " into ", c10::toString(types.result),
             ": it must be fp32 or fp64 and not narrower than the wire or the output");
  FSDP_CHECK(reduction.store == Store::kWrite || reduction.op == ReduceOp::kSum ||
                 reduction.op == ReduceOp::kAvg,
             "store of '", tag, "' is add for ", name_of(reduction.op),
             ": only floating sums and averages can be added to");
  return filled;
}

void reduce_ranks(const ReduceRange& range, const Reduction& reduction) {
  if (!is_floating_wire(range.types.wire)) return reduce_integers(range, reduction);
  const Look look = reduction.squares.defined()     ? Look::kForSquares
                    : reduction.nonfinite.defined() ? Look::kForNonfinite
                                                    : Look::kAway;
  const Seen seen = reduction.accumulate == at::kDouble
                        ? reduce_floating<double>(range, reduction, look)
                        : reduce_floating<float>(range, reduction, look);
  if (reduction.squares.defined()) *reduction.squares.mutable_data_ptr<double>() += seen.squares;
  // Atomic, since operations of several communicators may share one flag.
  if (seen.suspect && reduction.nonfinite.defined())
    std::atomic_ref<float>(*reduction.nonfinite.mutable_data_ptr<float>())
        .store(1.0f, std::memory_order_relaxed);
}

}  // namespace fsdp
