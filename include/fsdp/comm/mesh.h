// The ranks of a world as a grid: outer x inner axes, each with its communicators.
#pragma once

#include <memory>
#include <span>
#include <string>

namespace fsdp {

class Communicator;

struct MeshOptions {
  // Ranks along the outer axis: replicas (HSDP) or the second cut (HFSDP). Must divide the world;
  // the rest is the inner axis, along which parameters are sharded.
  int outer = 1;
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

// World rank = outer rank * inner size + inner rank, so that an inner group is neighbouring ranks:
// one host, where there are hosts.
//
//              inner 0  inner 1  inner 2
//   outer 0       0        1        2       a row: one inner group, holds one sharded copy
//   outer 1       3        4        5       a column: one outer group, equal shards
class Mesh {
 public:
  Mesh(Communicator& world, const MeshOptions& options);

  const MeshAxis& outer() const { return outer_; }
  const MeshAxis& inner() const { return inner_; }
  int size() const { return outer_.size() * inner_.size(); }

 private:
  MeshAxis outer_;
  MeshAxis inner_;
};

}  // namespace fsdp
