// Where the engine gets full-size temporary memory: from the pool, or beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

// The temporary memory of one bucket: what it may hold and what it holds now.
class SlabLease {
 public:
  // A bucket the pool knows, or (unit -1) one that always gets memory of its own.
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

// Where memory is wanted from. kPool: from there where it has room, else beside it.
enum class SlabFrom : uint8_t { kPool, kBeside };

// The pool knows the units in the order of a step. What does not fit into that gets memory of its
// own: units that contain other units (they stay live while those come and go, and would take a
// slot for good), buckets of a step that came in another order than planned, and uses that are not
// part of a step at all (an evaluation between a forward and its backward).
class SlabSource {
 public:
  // Memory beside the pool is kept for the next time (fixed addresses) unless the pool's own memory
  // comes and goes, too.
  SlabSource(SlabAllocator& allocator, PoolKind kind)
      : allocator_(allocator), keeps_own_(kind != PoolKind::kOnDemand) {}

  void set_pool(std::unique_ptr<BucketPool> pool) { pool_ = std::move(pool); }
  bool has_pool() const { return pool_ != nullptr; }
  BucketPool& pool() const { return *pool_; }

  // Whether the pool has room for it now.
  bool has_room(const SlabLease& lease) const {
    return lease.is_known_to_pool() && pool_->can_acquire(lease.id());
  }

  void acquire(SlabLease& lease, SlabFrom from);
  void release(SlabLease& lease);

  // After an error: whatever is held is not held any more.
  void forget(SlabLease& lease);

  // How often a bucket the pool knows found no room there.
  int64_t num_misses() const { return num_misses_; }

 private:
  SlabAllocator& allocator_;
  const bool keeps_own_;
  std::unique_ptr<BucketPool> pool_;
  int64_t num_misses_ = 0;
};

}  // namespace fsdp
