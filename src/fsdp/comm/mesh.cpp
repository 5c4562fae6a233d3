#include "fsdp/comm/mesh.h"

#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"

namespace fsdp {

namespace {

int inner_size_of(const Communicator& world, const MeshOptions& options) {
  FSDP_CHECK(options.outer >= 1 && world.size() % options.outer == 0, "outer is ", options.outer,
             " in a world of ", world.size(), " ranks: it must divide the number of ranks");
  return world.size() / options.outer;
}

// Ranks of one column are `inner` apart; ranks of one row share the quotient.
std::vector<int> columns(const Communicator& world, const MeshOptions& options) {
  const int inner = inner_size_of(world, options);
  std::vector<int> colors;
  for (int rank = 0; rank < world.size(); ++rank) colors.push_back(rank % inner);
  return colors;
}

std::vector<int> rows(const Communicator& world, const MeshOptions& options) {
  const int inner = inner_size_of(world, options);
  std::vector<int> colors;
  for (int rank = 0; rank < world.size(); ++rank) colors.push_back(rank / inner);
  return colors;
}

}  // namespace

MeshAxis::MeshAxis(std::string name, Communicator& world, std::span<const int> colors)
    : name_(std::move(name)),
      gather_(world.split(colors, name_ + " gather")),
      reduce_(world.split(colors, name_ + " reduce")) {}

MeshAxis::MeshAxis(MeshAxis&&) noexcept = default;
MeshAxis& MeshAxis::operator=(MeshAxis&&) noexcept = default;
MeshAxis::~MeshAxis() = default;

int MeshAxis::rank() const { return gather_->rank(); }
int MeshAxis::size() const { return gather_->size(); }

Mesh::Mesh(Communicator& world, const MeshOptions& options)
    : outer_("outer", world, columns(world, options)),
      inner_("inner", world, rows(world, options)) {}

}  // namespace fsdp
