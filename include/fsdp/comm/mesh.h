// The ranks of a world as two grids, one for dense parameters and one for experts, whose axes have
// communicators each.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace fsdp {

class Communicator;

struct MeshOptions {
  // Ranks along the outer axis: replicas (HSDP) or the second cut (HFSDP). Must divide the world;
  // the rest is the inner axis, along which parameters are sharded.
  int outer = 1;

  // Ranks that share out the experts of a layer: neighbours, each with experts of its own. Must
  // divide the inner axis, or be a multiple of it that divides the world.
  int ep = 1;
};

// One axis, seen from this rank. Gathering and reducing have a communicator each: operations of one
// communicator run in order, so with a single one the reduction of a unit would have to wait for
// the gather of the next.
class MeshAxis {
 public:
  MeshAxis(std::string name, Communicator& world, std::span<const int> colors);
  MeshAxis(MeshAxis&&) noexcept;
  MeshAxis& operator=(MeshAxis&&) noexcept;
  ~MeshAxis();

  const std::string& name() const { return name_; }
  int rank() const;
  int size() const;
  Communicator& gather() const { return *gather_; }
  Communicator& reduce() const { return *reduce_; }

 private:
  std::string name_;
  std::unique_ptr<Communicator> gather_;
  std::unique_ptr<Communicator> reduce_;
};

// Which parameters: all of them are dense unless a module says otherwise (expert_module.h).
enum class GridKind : uint8_t { kDense, kExpert };
inline constexpr std::array kGridKinds{GridKind::kDense, GridKind::kExpert};

// The two axes over which parameters of one kind are cut and reduced. Valid as long as the mesh.
struct Grid {
  const MeshAxis* outer;
  const MeshAxis* inner;
};

// World rank = outer rank * inner size + inner rank, so that an inner group is neighbouring ranks:
// one host, where there are hosts.
//
//              inner 0  inner 1  inner 2
//   outer 0       0        1        2       a row: one inner group, holds one sharded copy
//   outer 1       3        4        5       a column: one outer group, equal shards
//
// Experts see the same ranks as expert outer x expert inner x ep, the last one varying fastest:
// here with ep 2 of 2 outer x 4 inner ranks. A cell is the ranks of one ep group, which have one
// loss each and hold all experts together; equal places of the cells hold the same experts.
//
//              inner 0  inner 1
//   outer 0      0 1      2 3
//   outer 1      4 5      6 7
class Mesh {
 public:
  Mesh(Communicator& world, const MeshOptions& options);

  const MeshAxis& outer() const { return outer_; }
  const MeshAxis& inner() const { return inner_; }
  int size() const { return outer_.size() * inner_.size(); }

  // Without an ep axis (nullptr) both grids are outer x inner.
  const MeshAxis* ep() const { return experts_ ? &experts_->ep : nullptr; }
  Grid grid(GridKind kind) const;

 private:
  struct ExpertAxes {
    MeshAxis outer;
    MeshAxis inner;
    MeshAxis ep;
  };
  Mesh(Communicator& world, int inner, int expert_inner, int ep);
  static std::optional<ExpertAxes> expert_axes(Communicator& world, int inner, int ep);

  MeshAxis outer_;
  MeshAxis inner_;
  std::optional<ExpertAxes> experts_;
};

}  // namespace fsdp
