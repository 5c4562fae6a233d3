// What moves in a sharded model: which units are whole, which gradients are on their way.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/shard/direct_gradient.h"
#include "fsdp/shard/engine_memory.h"
#include "fsdp/shard/gather_pipeline.h"
#include "fsdp/shard/gradient_stand_ins.h"
#include "fsdp/shard/options.h"
#include "fsdp/shard/pass_plan.h"
#include "fsdp/shard/reduce_pipeline.h"
#include "fsdp/shard/slab_source.h"
#include "fsdp/shard/unit_state.h"
#include "fsdp/shard/user_buffer_memory.h"

namespace fsdp {

class UnitCall;

// Made by fully_shard(), kept alive by the model's units and by Sharded. One thread at a time may
// use it: the one that runs forward and backward. docs/engine.md tells the life of a step.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(const Mesh& mesh, const ShardOptions& options, c10::Device device);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const ShardOptions& options() const { return options_; }
  const Mesh& mesh() const { return mesh_; }
  MeshShape mesh_shape() const { return shape_; }
  c10::Device device() const { return device_; }
  EngineMemory& memory() { return memory_; }
  const SlabSource& slabs() const { return slabs_; }

  // --- construction (fully_shard.cpp) ---
  UnitState& add_unit(std::string name, UnitKind kind);
  const GroupSetting& setting_of(UnitKind kind) const;
  // All units and groups are there: declares their temporary memory and takes it. Gradients that
  // parameters have are dropped.
  void complete();
  // Something that must live as long as the engine.
  void keep(std::shared_ptr<void> something) { kept_ = std::move(something); }

  const std::vector<std::unique_ptr<UnitState>>& units() const { return units_; }
  const StepOrder& order() const { return plan_->order(); }

  // --- around a unit's forward and backward (unit_call.cpp) ---
  enum class CallMode : uint8_t {
    kTraining,   // with gradients, or the first forward of something that will be recomputed
    kRecompute,  // again, inside a backward
    kInference,  // without gradients
    kInBetween,  // without gradients, while a training pass is under way
  };
  CallMode begin_call(UnitState& unit);
  // A backward of the call may come, until it has come or cannot come any more. What was counted
  // before a reset() counts no more: uncount_call() takes what count_call() returned.
  int64_t count_call(UnitState& unit);
  void uncount_call(UnitState& unit, int64_t generation);
  int64_t next_call_number() { return next_call_number_++; }

  // A use of the unit, and of those that own parameters it shares; end_use() takes what begin_use()
  // returned.
  using Times = c10::SmallVector<int32_t, 4>;
  Times begin_use(UnitState& unit, Phase phase, CallMode mode);
  void end_use(UnitState& unit, const Times& times, Phase phase, CallMode mode);

  // A backward came to one of our hooks.
  void enter_backward();
  bool is_in_backward() const { return in_backward_; }
  // An Error when the running backward builds a graph itself.
  static void refuse_second_order();
  int64_t backward_number() const { return backward_number_; }
  // Ends calls that are newer than this one and had no hook of their own to tell (unit_call.h).
  void end_calls_after(int64_t number);
  void add_open_call(std::shared_ptr<UnitCall> call);
  // The backward of one call is over; that of the unit's last one starts its reduction.
  void call_is_through(UnitState& unit);

  // --- gradients (gradient_hook.cpp) ---
  // Autograd is through with a member; `gradient` is undefined when nothing came that way.
  void gradient_ready(UnitState& unit, GroupState& state, int64_t member,
                      const at::Tensor& gradient);
  // Where a layer may write a member's gradient itself; undefined when it must not.
  struct DirectTarget {
    at::Tensor target;
    bool adds = false;  // there is a contribution already
  };
  DirectTarget direct_target(UnitState& unit, GroupState& state, int64_t member, GradientType type);

  // --- updates (engine_updates.cpp) ---
  // One optimizer at a time, since each updates everything that is trainable; its place is free
  // again when what is returned is gone. UsageError where it is taken.
  std::shared_ptr<const std::string> seat_optimizer(std::string name);
  // Units with something to train, in the order in which the next forward is expected to use them;
  // first those that nobody announces.
  std::vector<UnitState*> update_order() const;
  // Until `update` is done an optimizer reads the unit's gradients and writes its weights and main
  // weights. The unit's next gather waits for it, and so does whoever else touches any of them; the
  // caller does not.
  void begin_update(UnitState& unit, Work update);
  void finish_updates();
  void abandon_updates() noexcept;

  // --- steps that are replayed (graph/) ---
  // Whether the next pass runs in memory that is there: no order was learned since it was planned.
  bool is_planned() const { return !new_order_; }
  // Another number means other memory or wire types for a step: what was recorded before uses what
  // is not there any more.
  int64_t plan_number() const { return plan_number_; }
  // A replay updates weights, or will, without the host's knowledge: the next gather of every unit
  // brings the other ranks' part.
  void expect_new_weights();
  bool has_gradients() const;
  // Of all trainable groups, in order.
  std::vector<GradientCycle> gradient_cycles() const;
  void set_gradient_cycles(const std::vector<GradientCycle>& cycles);

  // --- between steps (engine_between_steps.cpp; sharded.h says what they mean) ---
  void set_last_microbatch(bool is_last) { is_last_microbatch_ = is_last; }
  bool is_last_microbatch() const { return is_last_microbatch_; }
  void finish_gradients();
  // Gradients are complete and updates done: everything may be read and written.
  void settle();
  void zero_grad();
  void refresh_weights();
  // After MainWeights::set(): what other ranks set comes with the next gathers.
  void take_over_main_weights();
  bool found_nonfinite();
  // Somebody reads gradients, or has views of them and may at any time.
  void expect_reader() { waits_for_reader_ = false; }
  void set_grad_comm(std::optional<at::ScalarType> grad_comm);
  void release_weights();
  void reset();

 private:
  void open_pass(PassPlan::Kind kind);
  void close_pass();
  void make_pool(StepOrder order);
  void reserve_wire_slots();

  int32_t begin_one(UnitState& unit, Phase phase, CallMode mode);
  void end_one(UnitState& unit, int32_t time, Phase phase, CallMode mode);
  void gather_ahead(UnitState& unit, Phase phase, CallMode mode);
  void start_ahead(UnitState& unit, int32_t last);

  void settle_update(UnitState& unit);
  void gather_residents();

  void check_cycle() const;
  void heed_cleared_gradients();
  void count_unread_backward();
  void warn_unread(const std::string& what);
  void end_backward();
  enum class Which : uint8_t { kSafe, kAll };
  void reduce_rest(UnitState& unit, Which which);
  void forget_backward();
  void check_wire(const UnitState& unit, const GroupState& state, DType wire) const;

  const Mesh& mesh_;
  ShardOptions options_;
  const c10::Device device_;
  const MeshShape shape_;
  const std::unique_ptr<UserBufferMemory> registered_;  // where options ask for it
  EngineMemory memory_;
  std::optional<GroupSetting> setting_;           // of units
  std::optional<GroupSetting> resident_setting_;  // of parameters outside any unit
  at::Tensor nonfinite_;
  WireSlots wire_slots_;
  SlabSource slabs_;
  std::vector<std::unique_ptr<UnitState>> units_;
  std::vector<std::string> names_;  // of units, by index
  GatherPipeline gather_;
  std::optional<ReducePipeline> reduce_;
  std::optional<PassPlan> plan_;
  GradientStandIns stand_ins_;

  std::vector<StepSchedule::Gather> put_off_;  // nothing is gathered ahead while recomputing
  std::vector<std::shared_ptr<UnitCall>> open_calls_;  // of the running backward
  int32_t num_active_ = 0;                             // uses that compute now
  int64_t next_call_number_ = 0;
  int64_t generation_ = 0;

  bool in_backward_ = false;
  bool end_is_queued_ = false;
  int64_t backward_number_ = 0;
  int64_t microbatch_ = 0;  // of this cycle
  bool is_last_microbatch_ = true;
  std::optional<StepOrder> new_order_;  // to plan with before the next pass
  int64_t plan_number_ = 0;
  // Gradients are computed to be used: until somebody does, or it was said that nobody does.
  bool waits_for_reader_ = true;
  int32_t num_unread_backwards_ = 0;
  int32_t num_unread_cycles_ = 0;
  std::weak_ptr<const std::string> optimizer_;
  std::shared_ptr<void> kept_;
};

}  // namespace fsdp
