// The marks of a block (update_block.h): which of its weights' bits an update changes.
//
// For update_on_cpu.cpp, which compiles this for several instruction sets: everything must be
// inlined there.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "fsdp/base/compiler.h"
#include "fsdp/base/narrow_float.h"
#include "fsdp/optim/kernels/change_marks.h"
#include "fsdp/optim/kernels/split_weight.h"
#include "fsdp/optim/kernels/update_block.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp::block {

using Lanes [[gnu::vector_size(2 * kMarkLanes)]] = uint16_t;

// Calls update(i) for every element of the place, and marks those for which it returns a number
// other than 0.
template <typename Update>
FSDP_INLINED void mark_where(const UpdateSpan& span, const Place& place, const Update& update) {
  for (int64_t begin = 0; begin < place.count;) {
    const int64_t position = place.position + begin;
    const int64_t first = position % kScaleBlock;
    const int64_t count = std::min(place.count - begin, kScaleBlock - first);
    uint16_t* const marks = span.marks + first_mark_lane(span.flat_begin, position);
    if (count == kScaleBlock) {
      Lanes marked;
      std::memcpy(&marked, marks, sizeof(marked));
      Lanes bit = {1, 1, 1, 1, 1, 1, 1, 1};
      for (int64_t i = begin; i < begin + kScaleBlock; i += kMarkLanes) {
        alignas(16) std::array<uint16_t, kMarkLanes> changed;
        FSDP_INDEPENDENT_ITERATIONS
        for (int64_t k = 0; k < kMarkLanes; ++k) changed[static_cast<size_t>(k)] = update(i + k);
        Lanes lanes;
        std::memcpy(&lanes, changed.data(), sizeof(lanes));
        marked |= reinterpret_cast<Lanes>(lanes != 0) & bit;
        bit += bit;
      }
      std::memcpy(marks, &marked, sizeof(marked));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t k = first + i;
        const auto bit = static_cast<uint16_t>(1u << k / kMarkLanes);
        if (update(begin + i) != 0) marks[k % kMarkLanes] |= bit;
      }
    }
    begin += count;
  }
}

// --- weights that go through a stage -------------------------------------------------------------

// The bits of a block's weights before the update, as many as their type has.
struct CodeStage {
  std::array<uint16_t, kMaxNumel> narrow;
  std::array<uint32_t, kMaxNumel> wide;
};

// Where a main weight lies apart, the weight's bits are made of it: on a host there may be no
// weight, because the device has it.
FSDP_INLINED void keep_codes(const UpdateSpan& span, const Place& place, CodeStage& stage) {
  if (span.marks == nullptr) return;
  const auto count = static_cast<size_t>(place.count);
  const bool is_separate = span.main == MainWeight::kSeparate;
  if (span.weight_dtype == DType::kFloat32) {
    const void* from = is_separate ? span.main_weight : span.weight;
    std::memcpy(stage.wide.data(), static_cast<const uint32_t*>(from) + place.begin, count * 4);
  } else if (!is_separate) {
    std::memcpy(stage.narrow.data(), static_cast<const uint16_t*>(span.weight) + place.begin,
                count * 2);
  } else if (span.weight_dtype == DType::kBFloat16) {
    const auto* from = static_cast<const float*>(span.main_weight) + place.begin;
    FSDP_INDEPENDENT_ITERATIONS
    for (size_t i = 0; i < count; ++i) stage.narrow[i] = rounded_away(from[i]);
  } else {
    round_nearest<Fp16>(static_cast<const float*>(span.main_weight) + place.begin,
                        stage.narrow.data(), 0, place.count);
  }
}

// After the new weights are stored.
FSDP_INLINED void mark_changed(const UpdateSpan& span, const Place& place, const CodeStage& stage) {
  if (span.marks == nullptr) return;
  if (span.weight_dtype == DType::kFloat32) {
    const auto* now = static_cast<const uint32_t*>(span.weight) + place.begin;
    mark_where(span, place, [&](int64_t i) -> uint16_t {
      return now[i] != stage.wide[static_cast<size_t>(i)] ? 1 : 0;
    });
  } else {
    const auto* now = static_cast<const uint16_t*>(span.weight) + place.begin;
    mark_where(span, place, [&](int64_t i) -> uint16_t {
      return now[i] ^ stage.narrow[static_cast<size_t>(i)];
    });
  }
}

}  // namespace fsdp::block
