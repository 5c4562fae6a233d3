#include "fsdp/memory/on_demand_pool.h"

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

class OnDemandPool final : public BucketPool {
 public:
  OnDemandPool(BucketTable declared, LiveTrace step, int64_t alignment,
               SlabAllocator& slab_allocator)
      : BucketPool(std::move(declared), std::move(step), slab_allocator),
        slabs_(static_cast<size_t>(table().num_buckets())),
        alignment_(alignment),
        peak_bytes_(lower_bound_bytes(trace())) {}

  PoolKind kind() const override { return PoolKind::kOnDemand; }
  PoolBytes bytes() const override { return {.on_demand_peak = peak_bytes_}; }
  // The allocator may well return the same address again, but nobody promises it.
  bool address_is_fixed(BucketId) const override { return false; }
  std::span<const BucketId> previous_holders(BucketId) const override { return {}; }
  std::string report() const override {
    return concat("on_demand: up to ", bytes_text(static_cast<double>(peak_bytes_)),
                  " from allocator '", allocator_name_, "'; addresses are not fixed");
  }

 private:
  void reserve_memory() override {}
  void* take(BucketId id, int32_t index) override {
    Slab& slab = slabs_[static_cast<size_t>(index)];
    slab = Slab(allocator(), table().bucket(id).bytes, alignment_);
    return slab.at(0);
  }
  bool can_take(BucketId, int32_t) const override { return true; }
  void give_back(BucketId, int32_t index) override { slabs_[static_cast<size_t>(index)] = Slab(); }
  void restart_step() override {}
  std::string state_text() const override { return held_text(); }

  std::vector<Slab> slabs_;  // by flat index; empty when not held
  int64_t alignment_;
  int64_t peak_bytes_;
  std::string allocator_name_{allocator().name()};
};

}  // namespace

std::unique_ptr<BucketPool> make_on_demand_pool(BucketTable table, LiveTrace trace,
                                                int64_t alignment, SlabAllocator& allocator) {
  return std::make_unique<OnDemandPool>(std::move(table), std::move(trace), alignment, allocator);
}

}  // namespace fsdp
