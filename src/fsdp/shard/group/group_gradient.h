// The gradients of one parameter group: where they are written, add up and are reduced.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/operation.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/shard/group/flat_buffer.h"
#include "fsdp/shard/group/group_setting.h"
#include "fsdp/shard/group/redistribution.h"

namespace fsdp {

// Where a group's gradients are in the running backward.
enum class GradientPhase : uint8_t {
  kResting,   // no gradient has come yet
  kWriting,   // autograd and layers write, to the slab or to the main gradients
  kReducing,  // the slab is being reduced
  kReduced,   // the backward's part is in the main gradients
};

// How far a group's gradients have come in their cycle.
struct GradientCycle {
  int64_t num_backwards = 0;  // that have contributed
  bool is_over = false;       // the last reduction has started: another backward would add to sums
  bool has_squares = false;   // and it computes the sum of squares

  bool is_empty() const { return num_backwards == 0; }
};

// A backward writes a slab in the wire type, which is reduced into the main gradients; where the
// gradient placement is whole, it writes or adds to the main gradients directly, in their type.
// docs/engine.md ("Gradients") follows both ways through a cycle. No pass ever zeroes gradients:
// those that a cycle did not write are filled in at its end.
//
// Under lanes every backward writes a slab, which goes to the main gradients or to one of a few
// buffers beside them, so that micro-steps add up as the tree over lanes does (layout/lanes.h).
//
// The phases of a backward are resting -> writing -> reducing -> reduced; without a slab there is
// no reducing. A contribution after the reduction begins anew (reopen).
class GroupGradient {
 public:
  GroupGradient(const FlatLayout& layout, const GroupPaths& paths, const GroupTypes& types,
                const GroupSetting& setting);

  bool reduces_at_cycle_end() const { return cycle_end_.communicates(); }
  // The slots that the reductions at a cycle's end take for casts (WireSlots), and their size on
  // any rank; 0 where nothing is cast.
  struct CastRoom {
    int64_t bytes = 0;
    size_t num_slots = 0;
  };
  CastRoom cast_room() const;
  const FlatBuffer& main() const { return main_; }

  // Call it between cycles only.
  void set_wire(at::ScalarType wire);

  // --- one backward ---
  GradientPhase phase() const { return phase_; }
  // Whether the running backward's part is in the main gradients, or on its way there.
  bool is_reduced() const { return phase_ >= GradientPhase::kReducing; }

  // Begins writing: into this slab, or (nullptr, without slabs) into the main gradients.
  void begin_writing(void* slab);

  // Copies or adds the gradient of tensor `index` to its target, and casts it. On a device this may
  // wait for the group's other gradients, until somebody reads the target or reduces it.
  void accept(int64_t index, const at::Tensor& gradient);

  // Where a layer may write a gradient itself; undefined if it must not.
  struct Direct {
    at::Tensor target;
    bool adds = false;  // the target already holds a contribution
  };
  // Whether a layer that writes numbers of this type may: not where a gradient is scaled on its
  // way.
  bool takes_direct(at::ScalarType written) const;
  Direct direct(int64_t index);
  // The content of the target of tensor `index`; undefined if there is none.
  at::Tensor written(int64_t index);

  // With a slab: zeroes gradients that nobody wrote, and starts the slab's reduction. Sets
  // `nonfinite` if a stored value is not finite. Without one there is nothing to start.
  void end_writing(const at::Tensor& nonfinite, const Tag& tag);
  // Ends the reduction that has started; the slab may be released after it.
  void wait();

  // Back to resting: for the next backward, or for another contribution to this one.
  void reopen();

  // --- the end of a cycle ---
  // After the last microbatch: reduces gradients that are still partial.
  void start_cycle_reduction(const at::Tensor& nonfinite, const Tag& tag);

  // Whether everything that the optimizer reads has been reduced.
  bool is_complete() const {
    const bool are_all_added =
        setting_.has_lanes() ? cycle_.num_backwards == setting_.micro_steps : !cycle_.is_empty();
    return are_all_added && (!reduces_at_cycle_end() || cycle_.is_over);
  }

  // The sum of the squares of the optimizer's part, one fp64 element, if the cycle's last reduction
  // has computed it on its way; undefined otherwise, or if gradients were changed since.
  at::Tensor squares() const;

  // Also the state after a replayed step, which only the device has seen.
  const GradientCycle& cycle() const { return cycle_; }
  void set_cycle(const GradientCycle& cycle);

  // Whether autograd or a layer brought a gradient of tensor `index` in this cycle, on this rank;
  // and whether no rank had one, once the ranks have told each other (Gradients).
  bool came(int64_t index) const { return came_[static_cast<size_t>(index)]; }
  bool is_missing(int64_t index) const { return missing_[static_cast<size_t>(index)]; }
  void set_missing(int64_t index, bool missing) { missing_[static_cast<size_t>(index)] = missing; }

  // Begins a new cycle.
  void zero();
  // Hands the memory back if its lifetime is one step.
  void release();
  // After an error: waits for running work, ignores its errors, and begins a new cycle.
  void cancel() noexcept;

 private:
  void move(GradientPhase from, GradientPhase to);
  void make_views(const at::Tensor& flat);
  bool uses_slab() const { return each_backward_.communicates() || setting_.has_lanes(); }
  void allocate();
  const FlatBuffer& part(int64_t index) const {
    return index == 0 ? main_ : parts_[static_cast<size_t>(index - 1)];
  }
  void add_slab(const FlatBuffer& to, Store store);
  void fill_missing();
  const at::Tensor& target(int64_t index) const { return views_[static_cast<size_t>(index)]; }
  void mark_written(int64_t index);
  void place_accepted();
  void hold(const at::Tensor& target, const at::Tensor& gradient, bool adds);
  Reduction watched(const at::Tensor& nonfinite);

  const FlatLayout& layout_;
  const GroupSetting& setting_;
  Redistribution each_backward_;
  Redistribution cycle_end_;
  const double local_scale_;
  at::ScalarType wire_;
  FlatBuffer main_;
  std::vector<FlatBuffer> parts_;   // MicroStepParts beside the main gradients
  std::optional<FlatBuffer> slab_;  // whole, in the wire type
  std::optional<FlatBuffer> cast_;  // the main gradients in a slot, during their last reduction

  std::vector<FlatRange> padding_;  // of a whole buffer
  std::vector<at::Tensor> views_;   // one per tensor, in the slab or in the main gradients
  std::vector<at::Tensor> gaps_;    // views of the padding there
  at::Tensor viewed_;               // the buffer that views_ look at
  std::vector<bool> written_;       // in the slab, or in the main gradients during this cycle
  std::vector<bool> came_;          // in this cycle: brought, not filled in
  std::vector<bool> missing_;       // in this cycle: came on no rank

  // Accepted gradients on a device that wait for others, so that one launch brings all of them to
  // their targets, casting, as copy_() and add_() would.
  struct Held {
    at::Tensor target;
    at::Tensor gradient;
    bool adds;
  };
  std::vector<Held> held_;
  int64_t held_bytes_ = 0;
  std::optional<c10::Stream> held_on_;  // the stream of all of them

  at::Tensor squares_;            // see squares()
  uint32_t squares_version_ = 0;  // version of the gradients they belong to

  Work work_;
  GradientPhase phase_ = GradientPhase::kResting;
  GradientCycle cycle_;
};

}  // namespace fsdp
