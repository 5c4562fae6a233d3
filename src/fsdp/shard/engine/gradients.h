// The gradients of all units: taken from autograd, reduced while other units compute, through
// backwards and cycles.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/comm/operation.h"
#include "fsdp/shard/engine/gradient_hooks.h"
#include "fsdp/shard/engine/sharded_unit.h"
#include "fsdp/shard/layer_weights.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// Units whose unreduced gradients may be in memory at once: one computes, one is reduced.
inline constexpr int32_t kGradientSlots = 2;

// Parameters that got no gradient in a cycle, on any rank: a head that nothing used, a layer that
// was frozen after fully_shard().
//
// A missing gradient is zero in the main gradients, since other ranks may have one. Where no rank
// has, optimizers leave the parameter alone, as those of torch do.
class MissingGradients {
 public:
  MissingGradients(const Mesh& mesh, const ShardedUnits& units, c10::Device device)
      : mesh_(mesh), units_(units), device_(device) {}

  // After the end of a cycle: tells every group which of its gradients are missing
  // (GroupGradient::is_missing). All ranks call it.
  void find();

  // A step that is being recorded cannot wait for other ranks; it takes what the last eager step
  // learned.
  void set_recording(bool is_recording) { is_recording_ = is_recording; }

 private:
  // The trainable members of one grid, in order.
  struct OfGrid {
    std::vector<float> came;    // 1 where a gradient came on this rank, else 0
    std::vector<bool> missing;  // empty: none
    at::Tensor num_ranks;       // with a gradient
    Work telling;
  };
  void find(GridKind kind);
  std::vector<bool> ask_others(OfGrid& of, const Grid& grid, bool all_came) const;

  const Mesh& mesh_;
  const ShardedUnits& units_;
  const c10::Device device_;
  std::array<OfGrid, kGridKinds.size()> grids_;
  bool is_recording_ = false;
};

// A unit's gradients live in a slab from their first write until their reduction has ended, and the
// reduction of one unit ends at the latest with the next unit's backward. Pools plan with this, and
// every step keeps to it. A reduction at the end of a cycle (docs/engine.md) follows the last
// backward's, and may take until somebody wants the gradients.
class Gradients {
 public:
  Gradients(const ShardOptions& options, c10::Device device, const Mesh& mesh,
            const ShardedUnits& units, WireSlots& wire_slots, int64_t micro_steps);

  // After all units are added. Drops gradients that parameters have.
  void complete();

  // --- one backward ---
  void begin_backward();
  // Autograd is through with a member; `gradient` is undefined if a layer wrote it to its target
  // directly, or if there is none.
  void accept(ShardedUnit& unit, ParamGroup& group, int64_t member, const at::Tensor& gradient);
  // Where a layer may write a member's gradient itself; undefined if it must not.
  GroupGradient::Direct direct_target(ShardedUnit& unit, ParamGroup& group, int64_t member,
                                      GradientType type);
  // After all gradients of this backward except those of unused members: starts the reductions that
  // have not started.
  enum class Which : uint8_t { kAll, kWithSlabs };
  void reduce(ShardedUnit& unit, Which which);
  // At the end of the unit's backward: waits for the reductions of the units before it.
  void wait_all_but(const ShardedUnit& unit);
  void end_backward();

  // Waits until all reduced gradients are in place.
  void wait();

  // --- one cycle: the backwards between two calls of zero() ---
  void set_last_microbatch(bool is_last) { is_last_microbatch_ = is_last; }
  bool is_last_microbatch() const { return is_last_microbatch_; }
  // How many backwards this cycle has had.
  int64_t microbatch() const { return microbatch_; }
  void zero();
  // Ends the cycle: reduces what is still partial, and waits. UsageError that begins with `reader`
  // if no gradient has come. All ranks call it.
  void end_cycle(const char* reader);
  // UsageError unless the gradients of this cycle are there and complete.
  void check_complete(const char* reader) const;
  // Calls zero() if zero_grad() of a module, or of torch's optimizers, removed the stand-ins.
  void detect_external_zero_grad();
  bool has_any() const;
  // Whether any rank's gradients of this cycle hold a NaN or Inf. All ranks call it.
  bool found_nonfinite();
  MissingGradients& missing() { return missing_; }
  // How far the gradients of all trainable groups are, in order; a replayed step leaves the same
  // behind.
  std::vector<GradientCycle> cycles() const;
  void set_cycles(const std::vector<GradientCycle>& cycles);

  // Somebody reads gradients, or has views of them and may read at any time.
  void expect_reader() { waits_for_reader_ = false; }

  // Between cycles: sets the type in which gradients travel. UsageError if the pool has no room for
  // it.
  void set_wire(const PrecisionPolicy& precision);

  // After an error: ends all reductions and releases all slabs.
  void cancel() noexcept;
  // Cancels, and begins a new cycle.
  void reset();

 private:
  struct Reducing {
    ShardedUnit* unit;
    ParamGroup* group;
  };

  void prepare(ShardedUnit& unit);
  void reopen(ParamGroup& group);
  void reduce_group(ShardedUnit& unit, ParamGroup& group);
  void start_cycle_end(ShardedUnit& unit, ParamGroup& group);
  void wait_front();
  int32_t num_units_with_slabs(const ShardedUnit& but) const;
  void reserve_wire_slots();
  bool has_begun() const { return microbatch_ > 0 || has_any(); }
  void check_cycle() const;
  // UsageError that begins with `reader` if lanes of this cycle are missing.
  void check_lanes(const char* reader) const;
  void check_finite(const ParamGroup& group, int64_t member, const at::Tensor& gradient) const;
  void check_wire(const ParamGroup& group, DType wire) const;
  void count_unread_backward();
  void warn_unread(const std::string& what);

  const ShardOptions& options_;
  const Mesh& mesh_;
  const ShardedUnits& units_;
  WireSlots& wire_slots_;
  const int64_t micro_steps_;  // of lanes in a cycle; 0: there are no lanes
  at::Tensor nonfinite_;       // one element, set by reductions that store a NaN or Inf
  GradientStandIns stand_ins_;
  MissingGradients missing_;
  std::deque<Reducing> reducing_;    // slabs of this backward, oldest first
  std::deque<Reducing> completing_;  // reductions after the last backward
  bool is_last_ = true;              // of the running backward
  bool is_last_microbatch_ = true;   // of the next one
  int64_t microbatch_ = 0;           // of this cycle
  // Gradients are computed to be used: until somebody does, or it was said that nobody does.
  bool waits_for_reader_ = true;
  int32_t num_unread_backwards_ = 0;
  int32_t num_unread_cycles_ = 0;
};

}  // namespace fsdp
