// The temporary memory of one bucket, from the pool or beside it.
#pragma once

#include <cstdint>

#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

// kPool: from the pool if it has room, else beside it.
enum class SlabFrom : uint8_t { kPool, kBeside };

// The common part of all leases of a model.
struct SlabMemory {
  SlabAllocator& beside;
  // Memory beside the pool stays for the next time (fixed addresses), unless the pool's own memory
  // comes and goes, too.
  bool keeps_beside = true;
  int64_t num_misses = 0;  // how often the pool had no room for a bucket that it knows
};

// The pool knows the units in the order of a step. Other uses get their own memory: units that
// contain other units (they stay live while those come and go, and would take a slot for good),
// buckets of a step that came in another order than planned, and uses outside a step (an evaluation
// between a forward and its backward).
class SlabLease {
 public:
  // A bucket of this pool, or (nullptr) one that always gets its own memory.
  SlabLease(SlabMemory& memory, BucketPool* pool, BucketId id, int64_t num_bytes)
      : memory_(&memory), pool_(pool), id_(id), num_bytes_(num_bytes) {}

  int64_t num_bytes() const { return num_bytes_; }
  bool is_held() const { return is_held_; }
  void* address() const { return address_; }
  // Whether the pool has room now.
  bool has_room() const { return pool_ != nullptr && pool_->can_acquire(id_); }

  void acquire(SlabFrom from);
  void release();
  // After an error: holds nothing any more. The caller cancels the pool's step, too.
  void cancel();

 private:
  SlabMemory* memory_;
  BucketPool* pool_;
  BucketId id_;
  int64_t num_bytes_;
  void* address_ = nullptr;
  bool is_held_ = false;
  bool from_pool_ = false;
  Slab own_;
};

}  // namespace fsdp
