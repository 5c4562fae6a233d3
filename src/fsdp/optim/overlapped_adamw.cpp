#include "fsdp/optim/overlapped_adamw.h"

#if defined(__aarch64__)

#include <array>
#include <bit>
#include <iterator>
#include <utility>

#include "fsdp/optim/exact_quotient.h"
#include "fsdp/optim/overlapped_code.h"
#include "fsdp/optim/overlapped_orders.h"

namespace fsdp::overlapped {

namespace {

// --- code ----------------------------------------------------------------------------------------

template <size_t kPlace>
constexpr Code assembled_as_found() {
  constexpr Found kHere = kFound[kPlace];
  static_assert(is_order(Operations(kHere.kind), kHere.order));
  constexpr Code kCode = assembled(kHere.kind, kHere.order);
  static_assert(kCode.count > 0, "registers do not suffice");
  return kCode;
}

// In the order of kFound. Beside functions, where memory may be executed.
[[gnu::section(".text.overlapped_adamw")]] constexpr auto kCodes =
    []<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
  return std::array{assembled_as_found<kPlaces>()...};
}
(std::make_index_sequence<std::size(kFound)>());

using Function = void (*)(const Frame&);
Function function_of(Kind kind) {
  for (size_t i = 0; i < kCodes.size(); ++i)
    if (kFound[i].kind == kind) return std::bit_cast<Function>(kCodes[i].words.data());
  return nullptr;  // there is one for every kind
}

// --- spans ---------------------------------------------------------------------------------------

// Of moments that pass the tests: their roots are below 2^33.
bool has_exact_divisors(const AdamWFactors& by) {
  const float largest = -(by.root * 0x1p33f + by.eps);
  return -by.eps >= kMinExactDivisor && -by.root >= 0.0f && largest <= kMaxExactDivisor;
}

Frame frame_of(const AdamWFactors& by) {
  const auto four = [](float x) { return FourFloats{{x, x, x, x}}; };
  return {.beta1 = four(by.beta1),
          .beta2 = four(by.beta2),
          .to_first = four(by.to_first),
          .to_second = four(by.to_second),
          .root = four(by.root),
          .decay = four(by.decay),
          .eps = four(by.eps),
          .one = four(1.0f),
          .tested = ExactQuotientTest::kTested,
          .added = ExactQuotientTest::kAdded,
          .carried = ExactQuotientTest::kCarried};
}

Weights weights_of(MainWeight main) {
  if (main == MainWeight::kSplit) return Weights::kSplit;
  return main == MainWeight::kSeparate ? Weights::kSeparate : Weights::kWhole;
}

}  // namespace

int64_t update(const AdamWFactors& by, const UpdateSpan& span, int64_t begin, int64_t numel) {
  const bool has_wide_moments =
      span.first.dtype == DType::kFloat32 && span.second.dtype == DType::kFloat32;
  const bool has_half_gradients = span.gradient_dtype == DType::kBFloat16;
  const DType weight = span.main == MainWeight::kIsWeight ? DType::kFloat32 : DType::kBFloat16;
  if (!has_wide_moments || !(has_half_gradients || span.gradient_dtype == DType::kFloat32) ||
      span.weight_dtype != weight || !has_exact_divisors(by) || numel < kGroup)
    return 0;

  const auto from = [&](void* array, DType dtype) -> void* {
    return static_cast<std::byte*>(array) + begin * element_bytes(dtype);
  };
  const bool is_separate = span.main == MainWeight::kSeparate;
  Frame frame = frame_of(by);
  frame.gradient =
      static_cast<const std::byte*>(span.gradient) + begin * element_bytes(span.gradient_dtype);
  frame.first = from(span.first.values, DType::kFloat32);
  frame.second = from(span.second.values, DType::kFloat32);
  frame.weight = is_separate ? from(span.main_weight, DType::kFloat32) : from(span.weight, weight);
  if (is_separate) frame.lower = from(span.weight, DType::kBFloat16);
  if (span.main == MainWeight::kSplit) frame.lower = from(span.main_weight, DType::kBFloat16);
  frame.groups = numel / kGroup;
  const Kind kind{has_half_gradients ? Gradients::kBf16 : Gradients::kFp32, weights_of(span.main)};
  function_of(kind)(frame);
  return numel / kGroup * kGroup;
}

}  // namespace fsdp::overlapped

#endif  // __aarch64__
