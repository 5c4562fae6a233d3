#include "fsdp/optim/kernels/update_span.h"

#include <cstddef>

#include "fsdp/base/check.h"
#include "fsdp/optim/kernels/change_marks.h"

namespace fsdp {

namespace {

bool is_trained_in(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

void check_moment(const Moment& moment, std::string_view name) {
  FSDP_CHECK(moment.dtype == DType::kFloat32 || moment.dtype == DType::kBFloat16 ||
                 is_scaled(moment.dtype),
             "the ", name, " moment is ", name_of(moment.dtype),
             ": use fp32, bf16, fp16, fp8_e4m3 or fp8_e5m2");
  FSDP_CHECK(moment.values != nullptr, "the ", name,
             " moment has no memory: allocate it, filled with 0, before the first step");
  FSDP_CHECK(!is_scaled(moment.dtype) || moment.scales != nullptr, "the ", name, " moment is ",
             name_of(moment.dtype), " without scales: give it one fp32 scale per block of ",
             kScaleBlock, " elements, filled with 0");
}

void* moved(void* address, int64_t bytes) {
  return address == nullptr ? nullptr : static_cast<std::byte*>(address) + bytes;
}

}  // namespace

UpdateSpan part_of_span(const UpdateSpan& span, int64_t begin, int64_t numel) {
  FSDP_ASSERT(begin >= 0 && numel >= 0 && begin + numel <= span.numel);
  UpdateSpan part = span;
  if (span.gradient != nullptr)
    part.gradient =
        static_cast<const std::byte*>(span.gradient) + begin * element_bytes(span.gradient_dtype);
  part.weight = moved(span.weight, begin * element_bytes(span.weight_dtype));
  part.main_weight = moved(span.main_weight, begin * (span.main == MainWeight::kSplit ? 2 : 4));
  for (Moment* moment : {&part.first, &part.second}) {
    moment->values = moved(moment->values, begin * element_bytes(moment->dtype));
    if (moment->scales == nullptr) continue;
    FSDP_ASSERT(begin == 0 || (span.flat_begin + begin) % kScaleBlock == 0);
    moment->scales += (span.flat_begin + begin) / kScaleBlock - span.flat_begin / kScaleBlock;
  }
  if (span.marks != nullptr)
    part.marks += first_mark_lane(span.flat_begin, span.flat_begin + begin);
  part.numel = numel;
  part.flat_begin += begin;
  return part;
}

void check_span(const UpdateSpan& span, int num_moments) {
  FSDP_CHECK(span.numel >= 0 && span.flat_begin >= 0, "a span begins at ", span.flat_begin,
             " and has ", span.numel, " elements: neither may be negative");
  FSDP_CHECK(is_trained_in(span.gradient_dtype), "the gradient is ", name_of(span.gradient_dtype),
             ": use fp32, bf16 or fp16");
  FSDP_CHECK(is_trained_in(span.weight_dtype), "the weight is ", name_of(span.weight_dtype),
             ": use fp32, bf16 or fp16");
  FSDP_CHECK(span.main != MainWeight::kSplit || span.weight_dtype == DType::kBFloat16,
             "the main weight is split and the weight ", name_of(span.weight_dtype),
             ": only bf16 is the upper half of fp32");
  if (span.numel == 0) return;
  FSDP_CHECK(span.gradient != nullptr && span.weight != nullptr,
             "a span has no gradient or no weight: give both");
  FSDP_CHECK(span.main == MainWeight::kIsWeight || span.main_weight != nullptr,
             "a span has no main weight: give it, or choose MainWeight::kIsWeight");
  if (num_moments > 0) check_moment(span.first, "first");
  if (num_moments > 1) check_moment(span.second, "second");
}

}  // namespace fsdp
