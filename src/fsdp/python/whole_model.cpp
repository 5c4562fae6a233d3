#include "fsdp/python/whole_model.h"
#include "fsdp/nn/layers/weight_products.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <unordered_map>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/nn/layers/weight_products.h"
#include "fsdp/optim/kernels/thread_team.h"
#include "fsdp/optim/kernels/update_kernels.h"
#include "fsdp/optim/shard_passes.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/engine/engine_views.h"

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

at::Tensor join_slices(ShardedModel& model, const std::string& parameter, const at::Tensor& held) {
  const at::NoGradGuard no_grad;
  const at::Tensor own = nn::numbers_of(held);  // as they compute: of codes, if those are held
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

std::vector<ParameterPart> parts_of(const std::shared_ptr<ShardedModel>& model) {
  std::vector<ParameterPart> parts;
  for (const auto& unit : EngineAccess::of(model->sharded.get()).units())
    for (const ParamGroup& group : unit->groups())
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i)
        parts.emplace_back(model, group, i);
  return parts;
}

at::Tensor ParameterPart::main_weight() const {
  EngineAccess::of(model_->sharded.get()).wait();
  return group_->main_weights().at(group_->held_flat(member_));
}

void set_main_weights(ShardedModel& model, const std::map<std::string, at::Tensor>& values) {
  Engine& engine = EngineAccess::of(model.sharded.get());
  engine.wait();
  const at::NoGradGuard no_grad;
  for (const auto& unit : engine.units())
    for (ParamGroup& group : unit->groups())
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
        const auto it = values.find(group.name_of(i));
        if (it == values.end()) continue;
        const FlatRange held = group.held_of(i);
        FSDP_CHECK(it->second.numel() == held.numel(), "the part of '", it->first, "' has ",
                   it->second.numel(), " elements, and this rank has ", held.numel());
        const int64_t begin = group.layout().tensor_range(i).begin;
        if (!held.empty())
          group.main_weights().set({begin + held.begin, begin + held.end}, it->second);
      }
  engine.take_over_main_weights();
}

std::optional<at::Tensor> ParameterPart::gradient() const {
  EngineAccess::of(model_->sharded.get()).gradients().expect_reader();
  const at::Tensor gradient = group_->gradient_of(member_);
  return gradient.defined() ? std::optional(gradient) : std::nullopt;
}

void check_complete(ShardedModel& model, const char* reader) {
  Engine& engine = EngineAccess::of(model.sharded.get());
  engine.wait();
  engine.gradients().expect_reader();
  engine.gradients().check_complete(reader);
}

std::vector<std::optional<at::Tensor>> gradients_for_update(ShardedModel& model) {
  Engine& engine = EngineAccess::of(model.sharded.get());
  engine.refuse_while_whole("step()");
  engine.end_cycle("step()");
  engine.gradients().missing().find();
  std::vector<std::optional<at::Tensor>> gradients;
  for (const auto& unit : engine.units())
    for (const ParamGroup& group : unit->groups())
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
        gradients.emplace_back();
        if (!group.is_trainable() || group.gradient().is_missing(i)) continue;
        gradients.back() = group.gradient_of(i).to(group.main_weights().dtype());
      }
  return gradients;
}

namespace {

// Calls visit(gradient) for this rank's part of all gradients of a grid, padding included, which is
// zero.
void each_gradient(const EngineView& engine, GridKind grid, const auto& visit) {
  for (const auto& unit : engine.units())
    for (const ParamGroup& group : unit->groups())
      if (group.is_trainable() && grid_of(group) == grid)
        for (const MainWeightPiece& piece : group.main_weights().pieces())
          visit(group.gradient().main().at(piece.flat));
}

// The sum of the squares of all gradients, every element once; one fp64 element.
at::Tensor squared_gradient_norm(const UpdateView& engine) {
  const auto numbers = at::device(engine.device()).dtype(at::kDouble);
  const at::Tensor sum = at::zeros({1}, numbers);
  const at::Tensor workspace =
      sum.is_cpu() ? at::Tensor() : at::empty({squared_sum_workspace_numel()}, numbers);
  ThreadTeam team(at::get_num_threads());
  for (const GridKind grid : engine.mesh().grids()) {
    const at::Tensor squares = at::zeros_like(sum);
    each_gradient(engine, grid, [&](const at::Tensor& gradient) {
      add_squared_norm(gradient, squares, workspace, team);
    });
    engine.sum_over_shards(squares, grid, "squared norm", {}).wait();
    sum.add_(squares);
  }
  return sum;
}

void scale_all(const EngineView& engine, const at::Tensor& factor) {
  for (const GridKind grid : engine.mesh().grids())
    each_gradient(engine, grid, [&](const at::Tensor& gradient) {
      gradient.mul_(factor.to(gradient.scalar_type()));
    });
}

}  // namespace

at::Tensor clip_gradients(ShardedModel& model, double max_norm) {
  const UpdateView engine(model.sharded.get());
  EngineAccess::of(model.sharded.get()).end_cycle("clip_grad_norm_()");
  const at::Tensor norm = squared_gradient_norm(engine).sqrt_().squeeze();
  // torch.nn.utils.clip_grad_norm_ does this.
  scale_all(engine, (max_norm / (norm + 1e-6)).clamp_max_(1.0));
  return norm.to(at::kFloat);
}

void scale_gradients(ShardedModel& model, const at::Tensor& factor) {
  EngineAccess::of(model.sharded.get()).end_cycle("scale_gradients()");
  scale_all(EngineView(model.sharded.get()), factor);
}

}  // namespace fsdp
