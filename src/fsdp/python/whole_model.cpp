#include "fsdp/python/whole_model.h"

#include <ATen/ATen.h>

#include <unordered_map>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace {

struct MemberPlace {
  const ParamGroup* group;
  const GroupMember* member;
};

std::unordered_map<std::string, MemberPlace> members_by_name(const Engine& engine) {
  std::unordered_map<std::string, MemberPlace> all;
  for (const auto& unit : engine.units())
    for (const ParamGroup& group : unit->groups())
      for (const GroupMember& member : group.members())
        all[member.names.front()] = {&group, &member};
  return all;
}

GridKind grid_of(const ParamGroup& group) { return row_of(group.setting().kind).grid; }

}  // namespace

at::Tensor join_slices(ShardedModel& model, const std::string& parameter, const at::Tensor& own) {
  const Engine& engine = EngineAccess::of(model.sharded.get());
  const auto [group, member] = members_by_name(engine).at(parameter);
  const OwnedSlice& slice = member->owned;
  if (slice.is_whole()) return own.detach();
  const MeshAxis& owners = *engine.mesh().grid(grid_of(*group)).owners;
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), owners.size());
  const at::Tensor all = at::empty(sizes, own.options().requires_grad(false));
  owners.gather().all_gather(all, own.detach().contiguous(), parameter).wait();
  // Section by section: each has a part of every rank.
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const int64_t section : slice.sections) {
    const int64_t part = section / slice.count;
    for (int64_t rank = 0; rank < slice.count; ++rank)
      parts.push_back(all[rank].narrow(slice.dim, begin, part));
    begin += part;
  }
  return at::cat(parts, slice.dim);
}

at::Tensor squared_gradient_norm(ShardedModel& model) {
  const Engine& engine = EngineAccess::of(model.sharded.get());
  const auto places = members_by_name(engine);
  const std::vector<ShardedParameter> parameters = model.sharded->parameters();
  const at::Tensor sum = at::zeros({1}, at::device(engine.device()).dtype(at::kDouble));
  for (const GridKind grid : engine.mesh().grids()) {
    const at::Tensor squares = at::zeros_like(sum);
    for (const ShardedParameter& each : parameters)
      if (each.gradient.defined() && grid_of(*places.at(each.name).group) == grid)
        squares.add_(each.gradient.to(at::kDouble).square().sum());
    engine.sum_over_shards(squares, grid, "squared norm", {}).wait();
    sum.add_(squares);
  }
  return sum;
}

}  // namespace fsdp
