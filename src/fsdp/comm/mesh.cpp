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

// Of the expert grid. An ep group is one row of the dense grid or part of it, or several rows.
int expert_inner_size_of(const Communicator& world, const MeshOptions& options) {
  const int inner = inner_size_of(world, options);
  const bool divides_row = options.ep >= 1 && inner % options.ep == 0;
  const bool is_rows = options.ep >= 1 && options.ep % inner == 0 && world.size() % options.ep == 0;
  FSDP_CHECK(divides_row || is_rows, "ep is ", options.ep, " in a world of ", world.size(),
             " ranks = ", options.outer, " outer x ", inner, " inner: it must divide ", inner,
             ", or be a multiple of it that divides ", world.size());
  return divides_row ? inner / options.ep : 1;
}

// The color of every rank by its number.
std::vector<int> colors_by(const Communicator& world, const auto& color_of) {
  std::vector<int> colors;
  for (int rank = 0; rank < world.size(); ++rank) colors.push_back(color_of(rank));
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
    : Mesh(world, inner_size_of(world, options), expert_inner_size_of(world, options), options.ep) {
}

Mesh::Mesh(Communicator& world, int inner, int expert_inner, int ep)
    : outer_("outer", world, colors_by(world, [=](int rank) { return rank % inner; })),
      inner_("inner", world, colors_by(world, [=](int rank) { return rank / inner; })),
      experts_(expert_axes(world, expert_inner, ep)) {}

std::optional<Mesh::ExpertAxes> Mesh::expert_axes(Communicator& world, int inner, int ep) {
  if (ep == 1) return std::nullopt;
  // rank = (expert outer rank * inner + expert inner rank) * ep + ep rank
  return ExpertAxes{
      .outer = {"expert outer", world,
                colors_by(world, [=](int rank) { return rank % (inner * ep); })},
      .inner = {"expert inner", world,
                colors_by(world, [=](int rank) { return rank / (inner * ep) * ep + rank % ep; })},
      .ep = {"ep", world, colors_by(world, [=](int rank) { return rank / ep; })}};
}

Grid Mesh::grid(GridKind kind) const {
  if (kind == GridKind::kDense || !experts_) return {&outer_, &inner_};
  return {&experts_->outer, &experts_->inner};
}

}  // namespace fsdp
