#include "fsdp/comm/mesh.h"

#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"

namespace fsdp {

namespace {

std::string arithmetic(const Communicator& world, const MeshOptions& options, int row) {
  const int tp = options.tp;
  return tp > 1 && row % tp == 0
             ? concat(world.size(), " ranks = ", options.outer, " outer x ", row / tp, " inner x ",
                      tp, " tp")
             : concat(world.size(), " ranks = ", options.outer, " outer x ", row, " inner");
}

}  // namespace

// Ranks along each axis, and what the axes share.
struct Mesh::Plan {
  Plan(const Communicator& world, const MeshOptions& options)
      : outer(options.outer), ep(options.ep), tp(options.tp) {
    if (outer < 1 || world.size() % outer != 0)
      throw UsageError(concat("outer is ", outer, " in a world of ", world.size(),
                              " ranks: it must divide the number of ranks"));
    row = world.size() / outer;
    if (tp < 1 || row % tp != 0)
      throw UsageError(concat("tp is ", tp, " in a world of ", arithmetic(world, options, row),
                              ": it must divide ", row));
    tensor_inner = row / tp;
    // An ep group is one row or part of it, or several rows.
    const bool divides_row = ep >= 1 && row % ep == 0;
    const bool is_rows = ep >= 1 && ep % row == 0 && world.size() % ep == 0;
    if (!divides_row && !is_rows)
      throw UsageError(concat("ep is ", ep, " in a world of ", arithmetic(world, options, row),
                              ": it must divide ", row, ", or be a multiple of it that divides ",
                              world.size()));
    expert_inner = divides_row ? row / ep : 1;
    expert_outer = world.size() / (expert_inner * ep);
  }

  // Ranks that lie `stride` apart, `size` of them, are one group of an axis over which tensors are
  // cut.
  MeshAxis axis(std::string name, Communicator& world, int stride, int size) {
    return {std::move(name), world, colors(world, stride, size),
            SubgroupOptions{Messages::kToNobody, &gathers},
            SubgroupOptions{Messages::kOfSums, &reductions}};
  }
  // Neighbours that compute together, and wait for what they tell each other.
  MeshAxis axis_of_layers(std::string name, Communicator& world, int size, Messages messages) {
    return {std::move(name), world, colors(world, 1, size), SubgroupOptions{messages, &layers},
            SubgroupOptions{messages, &layers}};
  }

  int outer, row, tensor_inner, expert_outer, expert_inner, ep, tp;

 private:
  static std::vector<int> colors(const Communicator& world, int stride, int size) {
    std::vector<int> colors;
    for (int rank = 0; rank < world.size(); ++rank)
      colors.push_back(rank / (stride * size) * stride + rank % stride);
    return colors;
  }

  std::optional<c10::Stream> gathers, reductions, layers;
};

MeshAxis::MeshAxis(std::string name, Communicator& world, std::span<const int> colors,
                   const SubgroupOptions& gather, const SubgroupOptions& reduce)
    : name_(std::move(name)),
      gather_(world.split(colors, name_ + " gather", gather)),
      reduce_(world.split(colors, name_ + " reduce", reduce)) {}

MeshAxis::MeshAxis(MeshAxis&&) noexcept = default;
MeshAxis& MeshAxis::operator=(MeshAxis&&) noexcept = default;
MeshAxis::~MeshAxis() = default;

int MeshAxis::rank() const { return gather_->rank(); }
int MeshAxis::size() const { return gather_->size(); }

Mesh::Mesh(Communicator& world, const MeshOptions& options) : Mesh(world, Plan(world, options)) {}

Mesh::Mesh(Communicator& world, Plan plan)
    : outer_(plan.axis("outer", world, plan.row, plan.outer)),
      inner_(plan.axis("inner", world, 1, plan.row)),
      tensors_(tensor_axes(world, plan)),
      experts_(expert_axes(world, plan)),
      sum_group_(world.sum_group()) {}

std::optional<Mesh::TensorAxes> Mesh::tensor_axes(Communicator& world, Plan& plan) {
  if (plan.tp == 1) return std::nullopt;
  return TensorAxes{.inner = plan.axis("tensor inner", world, plan.tp, plan.tensor_inner),
                    .tp = plan.axis_of_layers("tp", world, plan.tp, Messages::kOfSums)};
}

std::optional<Mesh::ExpertAxes> Mesh::expert_axes(Communicator& world, Plan& plan) {
  const int ep = plan.ep;
  if (ep == 1) return std::nullopt;
  return ExpertAxes{
      .outer = plan.axis("expert outer", world, plan.expert_inner * ep, plan.expert_outer),
      .inner = plan.axis("expert inner", world, ep, plan.expert_inner),
      .ep = plan.axis_of_layers("ep", world, ep, Messages::kToAll)};
}

Grid Mesh::grid(GridKind kind) const {
  if (kind == GridKind::kTensor && tensors_) return {&outer_, &tensors_->inner, &tensors_->tp};
  if (kind == GridKind::kExpert && experts_)
    return {&experts_->outer, &experts_->inner, &experts_->ep};
  return {&outer_, &inner_};
}

std::vector<GridKind> Mesh::grids() const {
  std::vector<GridKind> kinds = {GridKind::kDense};
  for (const GridKind kind : kGridKinds)
    if (grid(kind).owners != nullptr) kinds.push_back(kind);
  return kinds;
}

int Mesh::data_parallel_rank() const {
  return (outer_.rank() * inner_.size() + inner_.rank()) / tp_size();
}

}  // namespace fsdp
