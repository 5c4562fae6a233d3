// A module's classes say what its parameters are: they are shared out among the ranks of an ep
// group or of a tp group, or are matrices that an optimizer updates whole (Muon).
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace fsdp {

class MeshAxis;

// A module derives from it if its own parameters (not its children's) have one slice per expert
// along their first dimension. fully_shard() on a mesh with an `ep` axis leaves it the slices of
// its rank's experts alone, which the axis numbers in order, and shards those over the ranks that
// have the same experts; without that axis nothing changes. Ranks of a tp group hand it tokens of
// their own: their gradients add up.
class ExpertModule {
 public:
  virtual ~ExpertModule() = default;

  // Called by fully_shard(), before the parameters lose slices. A forward then sends tokens to the
  // rank of their expert, and takes back the results, by the axis's communicators. The gradients of
  // its parameters are sums over the tokens of the whole ep group.
  virtual void join(const MeshAxis& ep) = 0;
};

// --- one parameter on the ranks of a tp group ----------------------------------------------------

// Whole on every rank, and all compute the same gradient of it. So is every parameter of which no
// module says otherwise.
struct TpEqual {
  friend bool operator==(const TpEqual&, const TpEqual&) = default;
};

// Whole on every rank, and each computes a part of its gradient, which is their sum: a norm, say,
// whose input is divided among the ranks by tokens.
struct TpPartial {
  friend bool operator==(const TpPartial&, const TpPartial&) = default;
};

// Each rank owns one of equal slices along `dim`. A tensor that fuses several has sections along
// the dim, and each section is sliced by itself: of a gate and an up projection in one tensor
// [2 * intermediate, hidden], two sections, a rank owns its part of the gate above its part of up.
struct TpShard {
  int64_t dim = 0;
  int64_t num_sections = 1;                 // of equal size
  std::vector<int64_t> section_sizes = {};  // if they differ: along the dim, in order
  // Where the ranks cannot share it evenly: TpPartial instead of an error. The module's join()
  // finds out likewise, by the sizes.
  bool partial_if_uneven = false;

  friend bool operator==(const TpShard&, const TpShard&) = default;
};

using TpPlacement = std::variant<TpEqual, TpPartial, TpShard>;

// A module derives from it if the ranks of a tp group compute it together. fully_shard() on a mesh
// with a `tp` axis leaves each rank its slices of the module's own parameters (not its children's),
// and shards those over the ranks that have the same slices; without that axis nothing changes. All
// ranks hand over the whole parameters.
class TensorParallelModule {
 public:
  virtual ~TensorParallelModule() = default;

  // The placement of an own parameter, by its name in this module; the same on all ranks.
  virtual TpPlacement tp_placement(const std::string& parameter) const = 0;

  // Called by fully_shard(), before the parameters lose slices. A forward then talks to the other
  // ranks of its group by the axis's communicators. They all have the same loss, and a slice's
  // gradient is that of this one loss.
  virtual void join(const MeshAxis& tp) = 0;
};

// Placements of parameters whose modules do not derive from it, by their names in the module tree:
// `*` is any text (dots too), `?` one character. Such modules find their ranks by Mesh::tp().
struct TensorParameters {
  std::string pattern;
  TpPlacement placement = TpShard{};

  friend bool operator==(const TensorParameters&, const TensorParameters&) = default;
};

// A module derives from it if its own parameters (not its children's) are matrices of a hidden
// layer: ShardOptions::matrices then gives each matrix one owner.
class MatrixModule {
 public:
  virtual ~MatrixModule() = default;

  // The rows of the matrices that a parameter consists of, from the top, again and again until the
  // parameter ends: several where projections are fused or experts lie one below the other. Empty:
  // it is none, such as a bias.
  virtual std::vector<int64_t> matrix_rows(const std::string& parameter) const = 0;
};

}  // namespace fsdp
