// Where a shard may end: the cuts through a tensor that a layout is allowed to make.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fsdp {

// Made by the four functions below.
struct Granularity {
  enum class Kind : uint8_t {
    kElement,  // anywhere
    kRow,      // between two rows, i.e. between two indices of dim 0
    kBlock,    // between two blocks of block_numel elements, counted from the tensor's start
    kTensor,   // nowhere: every tensor has one owner
  };
  Kind kind = Kind::kElement;
  int64_t block_numel = 1;  // of kBlock

  static constexpr Granularity element() { return {}; }
  static constexpr Granularity row() { return {.kind = Kind::kRow}; }
  static constexpr Granularity block(int64_t numel) {
    return {.kind = Kind::kBlock, .block_numel = numel};
  }
  static constexpr Granularity tensor() { return {.kind = Kind::kTensor}; }

  friend constexpr bool operator==(const Granularity&, const Granularity&) = default;
};

// "element", "row", "block(128)", "tensor".
std::string to_text(Granularity granularity);

// The inverse of to_text; UsageError for anything else.
Granularity parse_granularity(std::string_view text);

// The smallest number of elements of a tensor that must stay together (the last one of a tensor may
// be shorter): 1, a row, a block, or the whole tensor. Scalars and vectors have rows of 1 element.
int64_t indivisible_numel(Granularity granularity, std::span<const int64_t> shape);

}  // namespace fsdp
