#include "fsdp/shard/group/slab_source.h"

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

constexpr int64_t kAlignment = 128;  // as the pools'

}  // namespace

void SlabSource::acquire(SlabLease& lease, SlabFrom from) {
  FSDP_ASSERT(!lease.is_held_);
  lease.from_pool_ = from == SlabFrom::kPool && has_room(lease);
  if (lease.from_pool_) {
    lease.address_ = pool_->acquire(lease.id_);
  } else {
    if (lease.is_known_to_pool() && from == SlabFrom::kPool) ++num_misses_;
    if (lease.own_.bytes() != lease.num_bytes_)
      lease.own_ = Slab(allocator_, lease.num_bytes_, kAlignment);
    lease.address_ = lease.own_.at(0);
  }
  lease.is_held_ = true;
}

void SlabSource::release(SlabLease& lease) {
  FSDP_ASSERT(lease.is_held_);
  // Memory in place of the pool's is for one deviation and is freed; a unit's own memory stays.
  if (lease.from_pool_) {
    pool_->release(lease.id_);
  } else if (!keeps_own_ || lease.is_known_to_pool()) {
    lease.own_ = Slab();
  }
  lease.is_held_ = false;
  lease.address_ = nullptr;
}

void SlabSource::cancel(SlabLease& lease) {
  if (!lease.is_held_) return;
  lease.own_ = Slab();
  lease.is_held_ = false;
  lease.address_ = nullptr;
}

}  // namespace fsdp
