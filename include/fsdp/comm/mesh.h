// The ranks of a world as grids, one for each kind of parameters, whose axes have communicators.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fsdp {

// All parameters are dense unless a module says otherwise (module_roles.h).
enum class GridKind : uint8_t { kDense, kTensor, kExpert };
inline constexpr std::array kGridKinds{GridKind::kDense, GridKind::kTensor, GridKind::kExpert};

enum class ParameterKind : uint8_t {
  kEqual,    // whole, with equal gradients on the ranks of a tp group: without tp, every dense one
  kPartial,  // whole, with a part of its gradient on each rank of a tp group
  kTensor,   // a slice on each rank of a tp group
  kExpert,   // a slice on each rank of an ep group
};

struct ParameterKindRow {
  ParameterKind kind;
  GridKind grid;     // over which it is cut and reduced
  const char* name;  // of its buckets
};

inline constexpr std::array kParameterKinds{
    ParameterKindRow{ParameterKind::kEqual, GridKind::kDense, ""},
    ParameterKindRow{ParameterKind::kPartial, GridKind::kDense, "partial"},
    ParameterKindRow{ParameterKind::kTensor, GridKind::kTensor, "tensor"},
    ParameterKindRow{ParameterKind::kExpert, GridKind::kExpert, "expert"}};

constexpr const ParameterKindRow& row_of(ParameterKind kind) {
  return kParameterKinds[static_cast<size_t>(kind)];
}

class Communicator;
struct SubgroupOptions;

struct MeshOptions {
  // Ranks along the outer axis: replicas (HSDP) or the second cut (HFSDP). Must divide the world;
  // the rest is a row, along which parameters are sharded.
  int outer = 1;

  // Ranks that share out the experts of a layer: neighbours, each with experts of its own. Must
  // divide a row, or be a multiple of it that divides the world.
  int ep = 1;

  // Ranks that compute one loss together: neighbours, each with slices of its own of some tensors.
  // Must divide a row.
  int tp = 1;
};

// One axis, seen from this rank. Gathering and reducing have a communicator each: operations of one
// communicator run in order, so with a single one the reduction of a unit would have to wait for
// the gather of the next.
class MeshAxis {
 public:
  MeshAxis(std::string name, Communicator& world, std::span<const int> colors,
           const SubgroupOptions& gather, const SubgroupOptions& reduce);
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

// The axes over which parameters of one kind are cut and reduced. Valid as long as the mesh.
struct Grid {
  const MeshAxis* outer;
  const MeshAxis* inner;
  // Its ranks own slices, each of which is cut over outer x inner; nullptr: parameters are whole.
  const MeshAxis* owners = nullptr;
};

// World rank = outer rank * row size + place in the row, so that a row is neighbouring ranks: one
// host, where there are hosts. Dense parameters are cut along rows, the inner axis:
//
//              inner 0  inner 1  inner 2
//   outer 0       0        1        2       a row: one inner group, holds one sharded copy
//   outer 1       3        4        5       a column: one outer group, equal shards
//
// Tensor-parallel ones see a row as tensor inner x tp, the last one varying fastest: here with tp 2
// of 2 outer x 4 ranks. A cell is the ranks of one tp group, which have one loss and hold all
// slices together; equal places of the cells hold the same slices. Experts see the ranks as expert
// outer x expert inner x ep in the same way; a cell is the ranks of one ep group.
//
//              inner 0  inner 1
//   outer 0      0 1      2 3
//   outer 1      4 5      6 7
class Mesh {
 public:
  Mesh(Communicator& world, const MeshOptions& options);

  // The axes of dense parameters; together all ranks. A row has the ranks of its tp groups.
  const MeshAxis& outer() const { return outer_; }
  const MeshAxis& inner() const { return inner_; }
  int size() const { return outer_.size() * inner_.size(); }

  // Neighbours whose gradients are added first (Communicator::sum_group of all ranks).
  int sum_group() const { return sum_group_; }

  // nullptr without that axis: then its parameters are dense.
  const MeshAxis* ep() const { return experts_ ? &experts_->ep : nullptr; }
  const MeshAxis* tp() const { return tensors_ ? &tensors_->tp : nullptr; }
  Grid grid(GridKind kind) const;
  // The dense one, and those with owners.
  std::vector<GridKind> grids() const;

  // Batches computed at a time, and this rank's among them: ranks of a tp group share one batch and
  // its loss.
  int data_parallel_size() const { return size() / tp_size(); }
  int data_parallel_rank() const;

 private:
  struct TensorAxes {
    MeshAxis inner;
    MeshAxis tp;
  };
  struct ExpertAxes {
    MeshAxis outer;
    MeshAxis inner;
    MeshAxis ep;
  };
  struct Plan;
  Mesh(Communicator& world, Plan plan);
  static std::optional<TensorAxes> tensor_axes(Communicator& world, Plan& plan);
  static std::optional<ExpertAxes> expert_axes(Communicator& world, Plan& plan);
  int tp_size() const { return tensors_ ? tensors_->tp.size() : 1; }

  MeshAxis outer_;
  MeshAxis inner_;
  std::optional<TensorAxes> tensors_;
  std::optional<ExpertAxes> experts_;
  int sum_group_;
};

}  // namespace fsdp
