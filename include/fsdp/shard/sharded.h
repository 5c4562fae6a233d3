// The handle that a program holds after fully_shard(): the state of a sharded model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/shard/options.h"

namespace fsdp {

class Engine;
class ShardedUnit;

// This rank's part of one parameter, in the optimizer's placement.
struct ShardedParameter {
  std::string name;                  // its first name in the module tree
  std::vector<std::string> aliases;  // further names of a shared parameter
  std::string unit;
  std::vector<int64_t> shape;  // of the whole, or of this rank's slice of it (module_roles.h)
  bool is_trainable = true;
  int64_t begin = 0;  // elements [begin, begin + main_weight.numel()) of that, flattened
  // One-dimensional. A view; a copy if main weights are split or offloaded (ShardOptions).
  at::Tensor main_weight;
  at::Tensor gradient;  // the same elements; undefined if frozen, or while it has no memory
};

// One part for all neighbouring parameters of a group, padding included: for optimizers that work
// element by element.
struct FlatShard {
  std::string unit;
  at::Tensor main_weight;  // one-dimensional; a view
  at::Tensor gradient;     // the same elements; undefined while it has no memory
};

// Exact bytes, as requested from the allocator.
struct MemoryReport {
  int64_t weight_bytes = 0;       // sharded or whole, as the strategy says
  int64_t main_weight_bytes = 0;  // apart from the weights: whole ones, or remainders
  int64_t main_grad_bytes = 0;
  int64_t pool_bytes = 0;       // gathered weights and unreduced gradients
  int64_t reduction_bytes = 0;  // copies in the wire type
  int64_t moment_bytes = 0;     // the optimizer's, with their scales
  int64_t workspace_bytes = 0;  // Muon's, for its products
  int64_t peak_bytes = 0;       // the highest sum of all these so far
  int64_t host_bytes = 0;       // offloaded state: main weights, moments and staging memory

  int64_t total_bytes() const {
    return weight_bytes + main_weight_bytes + main_grad_bytes + pool_bytes + reduction_bytes +
           moment_bytes + workspace_bytes;
  }
  // One line per kind.
  std::string text() const;
};

// Whether a backward is the last one before the optimizer's step.
struct Microbatch {
  bool last = true;
};

// When set_prefetch() applies.
enum class PrefetchIn : uint8_t { kForward, kBackward };

// A handle: copies refer to the same model. The model's units keep everything alive, too.
class Sharded {
 public:
  explicit Sharded(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  // --- gradients -------------------------------------------------------------------------------
  // Backwards between two calls of zero_grad() add up. Announce all but the last one, since the
  // last one starts the reductions that happen once per cycle.
  class NoSync {
   public:
    explicit NoSync(std::shared_ptr<Engine> engine);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<Engine> engine_;
    bool was_last_;
  };
  // Backwards while the guard lives are not the last of their cycle.
  [[nodiscard]] NoSync no_sync() const { return NoSync(engine_); }
  // Says so of the backwards until the next call: microbatch({.last = i + 1 == n}).
  void microbatch(Microbatch microbatch) const;
  // Under ShardOptions::lanes: the lane that the next backward is of, whose data this rank takes,
  // and how many backwards a cycle has on each rank; which one is the last need not be said.
  int64_t lane() const;
  int64_t micro_steps() const;

  // Waits until the gradients of this cycle are complete. Functions that read them wait, too.
  void wait_gradients() const;
  // Ends the cycle now: reduces gradients of which no backward was the last one, and waits. All
  // ranks call it. UsageError if no gradient has come; zero_grad() comes before the next backward.
  void end_cycle() const;
  // Begins a new cycle. Writes nothing: the next backward overwrites.
  void zero_grad() const;
  // Whether any rank's gradients of this cycle hold a NaN or Inf. All ranks call it.
  bool found_nonfinite() const;

  // --- weights ---------------------------------------------------------------------------------
  // After the main weights were changed: brings the change to the computing weights.
  void refresh_weights() const;
  // After frozen weights have their values: quantised ones (Quantization::frozen) keep their codes,
  // and lose the numbers that these were made of. They cannot be saved or loaded any more, and
  // parameters() has no main_weight of them.
  void drop_frozen_numbers() const;

  enum class Access : uint8_t { kRead, kWrite };
  class FullParameters {
   public:
    FullParameters(std::shared_ptr<Engine> engine, Access access,
                   const std::vector<std::string>& units);
    // close(), whose errors become a warning.
    ~FullParameters();
    // Takes over what was written, and shards again. UsageError for a parameter that was given
    // memory of another shape; Error if the model was reset() meanwhile.
    void close();
    FullParameters(const FullParameters&) = delete;
    FullParameters& operator=(const FullParameters&) = delete;

   private:
    std::shared_ptr<Engine> engine_;
    const Access access_;
    std::vector<ShardedUnit*> units_;
    bool is_open_ = true;
  };
  // While the guard lives every parameter of these units (none: of all) is whole, also after
  // forwards and other guards; with kWrite, changes become the value, on all ranks alike. All ranks
  // call it. Updates wait until it has ended: step() is an error.
  [[nodiscard]] FullParameters full_parameters(Access access = Access::kRead,
                                               const std::vector<std::string>& units = {}) const {
    return FullParameters(engine_, access, units);
  }

  // Gathers these units now, until their next use ends or reshard(). All ranks call it.
  void unshard(const std::vector<std::string>& units) const;
  void reshard(const std::vector<std::string>& units) const;

  // --- what is there ---------------------------------------------------------------------------
  // Views, valid as long as the model; gradients of lifetime kStep until zero_grad().
  std::vector<ShardedParameter> parameters() const;
  // For trainable groups, to be changed in place; UsageError if there is nothing to view.
  std::vector<FlatShard> flat_shards() const;
  std::vector<std::string> unit_names() const;
  // The order in which units are now expected to begin.
  std::vector<std::string> unit_order() const;
  MemoryReport memory() const;
  // Counts this rank's casts of quantised weights since the last call: numbers out of range, which
  // got the largest code; numbers other than 0 whose code is 0; and all. fp64, [3], on the device;
  // add up those of all ranks. Between a backward and a step it waits for nothing.
  at::Tensor take_cast_counts() const;
  const ShardOptions& options() const;

  // --- changes ---------------------------------------------------------------------------------
  // Between cycles. Only grad_comm can change; docs/engine.md says what a fixed pool allows.
  void set_precision(const PrecisionPolicy& precision) const;
  // Replaces the recorded order's gathers when `unit` begins.
  void set_prefetch(const std::string& unit, const std::vector<std::string>& ahead,
                    PrefetchIn phase) const;
  // After an exception in forward or backward: drops everything under way and this cycle's
  // gradients. All ranks call it.
  void reset() const;

 private:
  friend struct EngineAccess;

  std::shared_ptr<Engine> engine_;
};

}  // namespace fsdp
