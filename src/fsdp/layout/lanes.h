// Lanes: a step's batch in parts that one backward each computes, and the tree in which gradients
// of lanes are added, whatever number of ranks computes them.
#pragma once

#include <bit>
#include <cstdint>

#include "fsdp/layout/strategy.h"

namespace fsdp {

// Gradients of lanes 0 .. lanes - 1 are added in a binary tree over their numbers (SumOrder). With
// R ranks (data-parallel ones; R divides the lanes) each computes a lane in each of lanes / R
// micro-steps. A sum over an axis of ranks is a level of that tree if the axis is a digit of the
// lane's number, and the sum over micro-steps is one if those are. So the digits stand in the order
// in which a strategy adds, the first ones lowest:
//
//   axes that every backward reduces | micro-steps | axes that the end of a cycle reduces
//
// inner before outer in both places. With ZeRO-2 and -3 without an outer axis micro-step m computes
// lanes m * R .. m * R + R - 1.
struct LaneOrder {
  int64_t lanes = 1;
  int64_t micro_steps = 1;
  int64_t step_stride = 1;  // in numbers of lanes
  MeshCoordinate rank_stride = {};

  // `ranks`: data-parallel ones along each axis. UsageErrors for numbers that are no powers of two,
  // and for more ranks than lanes.
  static LaneOrder of(int64_t lanes, const Strategy& strategy, MeshShape ranks);

  int64_t lane(MeshCoordinate rank, int64_t micro_step) const {
    return rank.outer * rank_stride.outer + rank.inner * rank_stride.inner +
           micro_step * step_stride;
  }
};

// A binary counter adds the contributions of micro-steps 0, 1, 2, ... as the tree does: each is
// written (even ones) or added (odd ones) to the part of its number, and after an odd one the parts
// are added that its number has completed.
struct MicroStepParts {
  // One of them is the main gradients themselves.
  static constexpr int64_t count(int64_t micro_steps) {
    return micro_steps <= 2 ? 1 : std::bit_width(static_cast<uint64_t>(micro_steps)) - 1;
  }
  static constexpr int64_t part_of(int64_t micro_step) {
    return std::popcount(static_cast<uint64_t>(micro_step) >> 1);
  }
  static constexpr bool is_added(int64_t micro_step) { return micro_step % 2 == 1; }

  // Calls add(to, from) for the parts that are complete after this micro-step, in order.
  template <typename Add>
  static void complete(int64_t micro_step, const Add& add) {
    if (!is_added(micro_step)) return;
    int64_t part = part_of(micro_step);
    for (int64_t rest = micro_step >> 1; rest % 2 == 1; rest >>= 1, --part) add(part - 1, part);
  }
};

}  // namespace fsdp
