// The units of a small model, for tests of pools: an embedding, equal blocks, and a larger head.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdp/memory/bucket_pool.h"

namespace fsdp::testing {

inline UnitBuckets block(const std::string& name, int64_t bytes) {
  return {name,
          {{"weight", bytes, DType::kBFloat16, BucketRole::kWeight},
           {"gradient", 2 * bytes, DType::kFloat32, BucketRole::kGradient}}};
}

inline std::vector<UnitBuckets> small_transformer() {
  return {block("embedding", 2048), block("layers.0", 1024), block("layers.1", 1024),
          block("layers.2", 1024),  block("layers.3", 1024), block("head", 4096)};
}

inline std::unique_ptr<BucketPool> small_transformer_pool(const PoolOptions& options,
                                                          SlabAllocator& allocator) {
  return make_bucket_pool(small_transformer(), options, allocator);
}

}  // namespace fsdp::testing
