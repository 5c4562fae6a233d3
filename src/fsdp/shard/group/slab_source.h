// The source of full-size temporary memory: the pool, or memory beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

// The temporary memory of one bucket: its size, and the slab it holds now.
class SlabLease {
 public:
  // A bucket that the pool knows, or (unit -1) one that always gets its own memory.
  SlabLease(BucketId id, int64_t num_bytes) : id_(id), num_bytes_(num_bytes) {}

  bool is_held() const { return is_held_; }
  void* address() const { return address_; }
  BucketId id() const { return id_; }
  bool is_known_to_pool() const { return id_.unit >= 0; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  friend class SlabSource;

  BucketId id_;
  int64_t num_bytes_ = 0;
  void* address_ = nullptr;
  bool is_held_ = false;
  bool from_pool_ = false;
  Slab own_;
};

// kPool: from the pool if it has room, else beside it.
enum class SlabFrom : uint8_t { kPool, kBeside };

// The pool knows the units in the order of a step. Other uses get their own memory: units that
// contain other units (they stay live while those come and go, and would take a slot for good),
// buckets of a step that came in another order than planned, and uses outside a step (an evaluation
// between a forward and its backward).
class SlabSource {
 public:
  // Keeps memory beside the pool for the next time (fixed addresses), unless the pool's own memory
  // comes and goes, too.
  SlabSource(SlabAllocator& allocator, PoolKind kind)
      : allocator_(allocator), keeps_own_(kind != PoolKind::kOnDemand) {}

  void set_pool(std::unique_ptr<BucketPool> pool) { pool_ = std::move(pool); }
  bool has_pool() const { return pool_ != nullptr; }
  BucketPool& pool() const { return *pool_; }

  // Whether the pool has room for the bucket now.
  bool has_room(const SlabLease& lease) const {
    return lease.is_known_to_pool() && pool_->can_acquire(lease.id());
  }

  void acquire(SlabLease& lease, SlabFrom from);
  void release(SlabLease& lease);

  // After an error: holds nothing any more. The caller cancels the pool's step, too.
  void cancel(SlabLease& lease);

  // How often the pool had no room for a bucket that it knows.
  int64_t num_misses() const { return num_misses_; }

 private:
  SlabAllocator& allocator_;
  const bool keeps_own_;
  std::unique_ptr<BucketPool> pool_;
  int64_t num_misses_ = 0;
};

}  // namespace fsdp
