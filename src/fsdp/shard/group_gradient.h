// The gradients of one parameter group: where they are written, accumulate and are reduced to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/comm/work.h"
#include "fsdp/shard/flat_buffer.h"
#include "fsdp/shard/gradient_reduction.h"
#include "fsdp/shard/group_setting.h"
#include "fsdp/shard/held_gradients.h"

namespace fsdp {

// How far a group's gradients have come in their cycle.
struct GradientCycle {
  bool is_empty = true;      // nothing contributed yet
  bool is_over = false;      // the last reduction has started
  bool has_squares = false;  // and computes the sum of squares
};

// Two ways through a cycle (a cycle is the microbatches between two calls of zero()):
//
//   gradient placement sharded       each backward writes a slab in the wire type, which is reduced
//                                    into the main gradients: the first one of a cycle writes them,
//                                    later ones add
//   gradient placement whole         each backward writes or adds to the main gradients directly,
//                                    in their own type
//
// Then, after the last microbatch, what is still partial is reduced, in the wire type. So no pass
// ever zeroes gradients: what a cycle did not write is filled in at its end.
class GroupGradient {
 public:
  GroupGradient(const FlatLayout& layout, const AxisCuts& cuts, const GroupTypes& types,
                const GroupSetting& setting);

  bool uses_slab() const { return reduction_.reduces_each_backward(); }
  bool reduces_at_cycle_end() const { return reduction_.reduces_at_cycle_end(); }
  // Of the cast before the reductions at a cycle's end, on any rank; 0 where none is needed.
  int64_t cast_bytes() const;
  size_t num_stages_at_cycle_end() const { return reduction_.num_stages_at_cycle_end(); }
  at::ScalarType wire() const { return wire_; }
  at::ScalarType main_dtype() const { return main_.dtype(); }
  const FlatBuffer& main() const { return main_; }

  // Between cycles only.
  void set_wire(at::ScalarType wire);

  // --- writing ---
  // The slab for this backward; only when uses_slab().
  void begin_slab(void* address);
  bool has_slab() const { return has_slab_; }

  // Where tensor `index` is to be written, shaped like it; whether it already holds a contribution
  // that must be added to.
  const at::Tensor& target(int64_t index) const { return views_[static_cast<size_t>(index)]; }
  bool is_written(int64_t index) const { return written_[static_cast<size_t>(index)]; }
  void mark_written(int64_t index) { written_[static_cast<size_t>(index)] = true; }
  // Makes target() valid when no slab is used.
  void begin_direct();

  // Copies (or adds) a gradient to its target, casting. On a device this may wait for the group's
  // other gradients, until place_accepted() or the reduction.
  void accept(int64_t index, const at::Tensor& gradient);
  void place_accepted() { held_.pack(); }

  // --- reducing ---
  // Gradients nobody wrote are zero. Then the slab's reduction starts.
  void start_backward_reduction(const at::Tensor& nonfinite, const Tag& tag);
  // After this the slab may be given back; nothing is in flight.
  void finish_backward_reduction();

  // After the last microbatch: what is still partial.
  void start_cycle_reduction(const at::Tensor& nonfinite, const Tag& tag);
  void finish_cycle_reduction();

  // Whether the cycle's last reduction has started: another backward would add to reduced values.
  bool is_cycle_over() const { return cycle_.is_over; }
  bool is_empty() const { return cycle_.is_empty; }

  // Whether everything the optimizer wants has been reduced.
  bool is_complete() const {
    return !cycle_.is_empty && (!reduces_at_cycle_end() || cycle_.is_over);
  }

  // The sum of the squares of the optimizer's part, one fp64 element, where the cycle's last
  // reduction has computed it on its way; undefined where nobody has, or gradients were changed
  // since.
  at::Tensor squares() const;

  // What a replayed step leaves behind is what the recorded one left: only a device has seen it.
  const GradientCycle& cycle() const { return cycle_; }
  void set_cycle(const GradientCycle& cycle);

  // Begins a new cycle.
  void zero();
  // Lets the memory go, where it lives for a step only.
  void give_back();
  // The same after an error: what is in flight is waited for, and its errors are ignored.
  void abandon() noexcept;

 private:
  void make_views(const at::Tensor& flat);
  void fill_missing();
  GradientReduction::Watched watched(const at::Tensor& nonfinite);

  const FlatLayout& layout_;
  const GroupSetting& setting_;
  GradientReduction reduction_;
  at::ScalarType wire_;
  FlatBuffer main_;
  std::optional<FlatBuffer> cast_;  // of the main gradients, in a slot during their last reduction

  at::Tensor slab_;                 // flat, wire type: where it is, or was last
  bool has_slab_ = false;           // during a backward
  std::vector<FlatRange> padding_;  // of a whole buffer
  std::vector<at::Tensor> views_;   // one per tensor, in the slab or in the main gradients
  std::vector<at::Tensor> gaps_;    // views of the padding there
  at::Tensor viewed_;               // what views_ look at
  std::vector<bool> written_;       // in the slab, or in the main gradients during this cycle
  HeldGradients held_;              // accepted ones that are not in place yet

  at::Tensor squares_;            // see squares()
  uint32_t squares_version_ = 0;  // of the gradients they are of

  Work work_;
  GradientCycle cycle_;
};

}  // namespace fsdp
