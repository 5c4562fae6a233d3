// The temporary full-size memory of gathered weights and unreduced gradients: acquire and release
// by bucket, with exact bytes known before anything is allocated.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/live_trace.h"
#include "fsdp/memory/pool_options.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

struct PoolOptions {
  PoolKind kind = PoolKind::kMaxPool;
  // Units gathered ahead of the one that computes. Slots for weights: prefetch + 1, or as many as
  // uses nested in each other need.
  int32_t prefetch = 1;
  // Units whose gradients may be live at once: one that computes and one being reduced. Nested
  // uses may need more and get them.
  int32_t gradient_slots = 2;
  // double_buffer: the units that are not like the most common one.
  OtherUnits other_units = OtherUnits::kOnDemand;
  // double_buffer, max_pool: a unit's slot is taken because the order changed.
  OnMove on_move = OnMove::kFollow;
  // The order of the step, as recorded; empty: units in order of declaration, backward in reverse.
  // `planned` computes its offsets from it, the others the peak of what is allocated on demand.
  StepOrder order = {};
  // The deepest prefetch with which the pool stays within this is chosen instead of `prefetch`; 0
  // for no limit.
  int64_t budget_bytes = 0;
  // Every address is a multiple of it, in bytes; a power of two. The flat layout pads buckets to
  // the same.
  int64_t alignment = 128;

  // Throws UsageError naming field, value and the allowed set.
  void validate() const;
};

// The memory that a pool takes from its allocator.
struct PoolBytes {
  int64_t weight = 0;    // fixed memory only weights use
  int64_t gradient = 0;  // fixed memory only gradients use
  int64_t shared = 0;    // fixed memory both use (the arena)
  // Most bytes allocated on demand at one time, when the step follows the order of the options.
  int64_t on_demand_peak = 0;

  int64_t fixed() const { return weight + gradient + shared; }
  int64_t total() const { return fixed() + on_demand_peak; }
};

// Hands out addresses for declared buckets.
//
// Strict assignment: the n-th acquire of a bucket in a step gets the same address in every step,
// where address_is_fixed() says so. A step begins with begin_step(); nothing may be held then.
//
// The engine acquires a unit's buckets of one role together and in order; release may come later
// and in any order. Acquire and release neither allocate nor hash once the first step has been
// seen (buckets that are on demand by choice excepted).
//
// One pool belongs to one rank and is used by one thread at a time. It knows nothing of streams:
// acquire and release are host-side bookkeeping. A caller that writes to an address on one stream
// while its previous holder may still be read on another must order the two by an event.
class BucketPool {
 public:
  virtual ~BucketPool() = default;
  BucketPool(const BucketPool&) = delete;
  BucketPool& operator=(const BucketPool&) = delete;

  const BucketTable& table() const { return table_; }
  // The step the pool was made for: who should acquire and release what when. The planned pool may
  // begin some prefetches one unit later than asked, and then relies on it.
  const LiveTrace& trace() const { return trace_; }
  virtual PoolKind kind() const = 0;

  // Known from the declaration alone.
  virtual PoolBytes bytes() const = 0;

  // Takes the fixed memory from the allocator; the first acquire does it otherwise.
  void reserve();

  void begin_step();

  // The address of the bucket's bytes; meaningless for a bucket of 0 bytes.
  void* acquire(BucketId id);
  void release(BucketId id);

  // Whether acquire() would succeed now: the bucket is not held, its place is free, and the plan
  // has a stay left for it. A caller whose step is not the recorded one asks before it chooses
  // other memory. As quick as acquire(); memory on demand counts as free.
  bool can_acquire(BucketId id) const;

  // Releases everything that is held, after a step that failed; begin_step() comes next, as always.
  // Wait for all streams first.
  void cancel_step() noexcept;

  virtual bool address_is_fixed(BucketId id) const = 0;
  bool addresses_are_fixed() const;

  // The pool's memory and its reasons, for the log: one line per fact.
  virtual std::string report() const = 0;

 protected:
  BucketPool(BucketTable table, LiveTrace trace, SlabAllocator& allocator)
      : table_(std::move(table)),
        trace_(std::move(trace)),
        allocator_(allocator),
        held_(static_cast<size_t>(table_.num_buckets()), 0) {}

  SlabAllocator& allocator() { return allocator_; }

  virtual void reserve_memory() = 0;
  virtual void* take(BucketId id, int32_t index) = 0;
  // Whether take() would succeed.
  virtual bool can_take(BucketId id, int32_t index) const = 0;
  virtual void release_memory(BucketId id, int32_t index) = 0;
  virtual void reset_step() = 0;

 private:
  // The held buckets by name, for error messages.
  std::string held_text() const;

  BucketTable table_;
  LiveTrace trace_;
  SlabAllocator& allocator_;
  std::vector<uint8_t> held_;  // whether it is, by flat index
  int32_t num_held_ = 0;
  bool reserved_ = false;
};

// The allocator must outlive the pool. Nothing is allocated yet.
std::unique_ptr<BucketPool> make_bucket_pool(std::vector<UnitBuckets> units,
                                             const PoolOptions& options, SlabAllocator& allocator);

}  // namespace fsdp
