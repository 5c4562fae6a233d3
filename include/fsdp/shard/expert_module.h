// Modules whose parameters are shared out among the ranks of an ep group.
#pragma once

namespace fsdp {

class MeshAxis;

// A module derives from it if its own parameters (not its children's) have one slice per expert
// along their first dimension. fully_shard() on a mesh with an `ep` axis leaves it the slices of
// its rank's experts alone, which the axis numbers in order, and shards those over the ranks that
// have the same experts; without that axis nothing changes.
class ExpertModule {
 public:
  virtual ~ExpertModule() = default;

  // Called by fully_shard(), before the parameters lose slices. A forward then sends tokens to the
  // rank of their expert, and takes back the results, by the axis's communicators. The gradients of
  // its parameters are sums over the tokens of the whole ep group.
  virtual void join(const MeshAxis& ep) = 0;
};

}  // namespace fsdp
