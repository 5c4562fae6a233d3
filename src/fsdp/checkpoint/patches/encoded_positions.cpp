#include "fsdp/checkpoint/patches/encoded_positions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

namespace fsdp {

namespace {

// How many numbers more than elements skips take.
at::Tensor num_more(const at::Tensor& skips, int64_t largest) {
  return skips.div(largest, "trunc").sum();
}

// Numbers of `dtype`, unsigned whatever it says, of which `largest` is the largest.
at::Tensor numbers_of(const at::Tensor& skips, int64_t more, int64_t largest,
                      at::ScalarType dtype) {
  if (more == 0) return skips.to(dtype);
  const at::Tensor places = skips.div(largest, "trunc").add_(1).cumsum(0).sub_(1);
  return at::zeros({skips.numel() + more}, skips.options().dtype(dtype))
      .bitwise_not_()  // the largest number everywhere
      .index_copy_(0, places, skips.remainder(largest).to(dtype));
}

// `skips` of neighbours are 0.
at::Tensor as_ranges(const at::Tensor& positions, const at::Tensor& skips) {
  const at::Tensor is_first = skips.ne(0);
  is_first[0].fill_(true);
  const at::Tensor first = is_first.nonzero().view({-1});
  const at::Tensor last =
      at::cat({first.slice(0, 1), at::full({1}, positions.numel(), first.options())}).sub_(1);
  return at::stack({positions.index_select(0, first), positions.index_select(0, last).add_(1)}, 1);
}

}  // namespace

EncodedPositions encoded(const at::Tensor& positions) {
  const at::Tensor before = at::full({1}, -1, positions.options());
  const at::Tensor skips = positions.diff(1, 0, before).sub_(1);
  const at::Tensor sizes =
      at::stack({num_more(skips, largest_skip<uint8_t>()),
                 num_more(skips, largest_skip<uint16_t>()), skips.slice(0, 1).ne(0).sum().add_(1)})
          .cpu();
  const auto* size = sizes.const_data_ptr<int64_t>();
  const int64_t narrow_bytes = positions.numel() + size[0];
  const int64_t wide_bytes = 2 * (positions.numel() + size[1]);
  const int64_t range_bytes = static_cast<int64_t>(sizeof(FlatRange)) * size[2];
  if (range_bytes <= std::min(narrow_bytes, wide_bytes))
    return {PositionForm::kRanges, as_ranges(positions, skips).cpu()};
  if (narrow_bytes <= wide_bytes)
    return {PositionForm::kSkips,
            numbers_of(skips, size[0], largest_skip<uint8_t>(), at::kByte).cpu()};
  return {PositionForm::kWideSkips,
          numbers_of(skips, size[1], largest_skip<uint16_t>(), at::kShort).cpu()};
}

EncodedPositions encoded(std::span<const FlatRange> ranges) {
  const at::Tensor numbers = at::empty({static_cast<int64_t>(ranges.size()), 2}, at::kLong);
  static_assert(sizeof(FlatRange) == 2 * sizeof(int64_t));
  std::memcpy(numbers.mutable_data_ptr(), ranges.data(), ranges.size_bytes());
  return {PositionForm::kRanges, numbers};
}

}  // namespace fsdp
