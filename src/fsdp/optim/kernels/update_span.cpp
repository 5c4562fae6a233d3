#include "fsdp/optim/kernels/update_span.h"

#include <cstddef>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

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

void find_marked(const uint16_t* marks, int64_t begin, FlatRange flat,
                 std::vector<int64_t>& positions) {
  for (int64_t block = flat.begin / kScaleBlock * kScaleBlock; block < flat.end;
       block += kScaleBlock) {
    const uint16_t* lanes = marks + first_mark_lane(begin, block);
    uint32_t any = 0;
    for (int64_t k = 0; k < kMarkLanes; ++k) any |= lanes[k];
    for (; any != 0; any &= any - 1) {
      const int j = std::countr_zero(any);
      for (int64_t k = 0; k < kMarkLanes; ++k) {
        const int64_t position = block + kMarkLanes * j + k;
        if ((lanes[k] >> j & 1) != 0 && position >= flat.begin && position < flat.end)
          positions.push_back(position);
      }
    }
  }
}

}  // namespace fsdp
