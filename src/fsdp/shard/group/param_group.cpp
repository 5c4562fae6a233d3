#include "fsdp/shard/group/param_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/torch_dtype.h"

namespace fsdp {

namespace {

FlatLayoutRequest layout_request(const std::vector<GroupMember>& members, const GroupTypes& types,
                                 const GroupSetting& setting, std::vector<int64_t> held_numel) {
  FlatLayoutRequest request{.shapes = {},
                            .element_bytes = narrowest_bytes(types),
                            .inner_ranks = setting.shape.inner,
                            .outer_ranks = setting.shape.outer,
                            .granularity = setting.granularity,
                            .held_numel = std::move(held_numel)};
  for (const GroupMember& member : members)
    request.shapes.push_back(owned_shape(member.owned, member.parameter.sizes()));
  return request;
}

// The error for touching a parameter while its unit is sharded.
std::string sharded_sentence(const std::string& unit, const GroupMember& member) {
  return concat("parameter '", member.names.front(), "' is touched while its unit '", unit,
                "' is sharded; use it inside the forward of a unit that holds it (a unit named in "
                "ShardOptions::units is called by fsdp::call_unit), or under "
                "Sharded::full_parameters() (Python: fsdp_cpp.unshard(model))");
}

FlatBufferSpec weight_spec(PlacementPair placed, DType dtype, const GroupSetting& setting) {
  return {.placed = placed,
          .rank = setting.rank,
          .dtype = scalar_type_of(dtype),
          .device = setting.device};
}

}  // namespace

ParamGroup::ParamGroup(std::string unit, std::vector<GroupMember> members, Trainable trainable,
                       const GroupSetting& setting, std::vector<int64_t> held_numel)
    : ParamGroup(std::move(unit), std::move(members), trainable, setting, std::move(held_numel),
                 group_paths(setting.strategy, setting.shape, setting.gradient, setting.num_losses,
                             setting.num_copies)) {}

ParamGroup::ParamGroup(std::string unit, std::vector<GroupMember> members, Trainable trainable,
                       const GroupSetting& setting, std::vector<int64_t> held_numel,
                       const GroupPaths& paths)
    : unit_(std::move(unit)),
      setting_(setting),
      members_(std::move(members)),
      types_(resolve_types(dtype_of(members_.front().computes_in), setting.precision, trainable)),
      layout_(layout_request(members_, types_, setting, std::move(held_numel))),
      weight_(layout_, weight_spec(setting.strategy.parameter, types_.weight, setting),
              &setting.memory.weight),
      whole_(layout_, weight_spec({}, types_.weight, setting)),
      refresh_(layout_, setting.grid, setting.rank, paths.refresh),
      unshard_(layout_, setting.grid, setting.rank, paths.unshard) {
  weight_.allocate();
  for (size_t i = 0; i < members_.size(); ++i)
    storages_.emplace_back(
        layout_.tensor_range(static_cast<int64_t>(i)).numel() * element_bytes(types_.weight),
        setting.device, sharded_sentence(unit_, members_[i]));
  main_weights_.emplace(layout_, types_, setting, weight_);  // needs the weights' memory
  if (types_.trainable) gradient_.emplace(layout_, paths, types_, setting);
  if (!needs_slab()) bind(weight_);
}

GroupBuckets ParamGroup::buckets() const {
  return group_buckets(layout_, types_, setting_.strategy, setting_.shape,
                       row_of(setting_.kind).name);
}

void ParamGroup::set_value(int64_t index, const at::Tensor& value) {
  const OwnedSlice& owned = owned_of(index);
  if (owned.is_whole()) return set_owned_value(index, value);
  std::vector<at::Tensor> parts;
  for (const FlatRange& part : owned_parts(owned))
    parts.push_back(value.detach().narrow(owned.dim, part.begin, part.numel()));
  set_owned_value(index, parts.size() == 1 ? parts.front() : at::cat(parts, owned.dim));
}

void ParamGroup::set_owned_value(int64_t index, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  // A module on the meta device is initialised in a wider type than it was built in.
  const at::Tensor built = value.detach().to(members_[static_cast<size_t>(index)].built_as);
  weight_.set(index, built.to(weight_.dtype()));
  main_weights_->set(layout_.tensor_range(index), built);
}

void ParamGroup::take_over_values() {
  for (size_t i = 0; i < members_.size(); ++i)
    set_owned_value(static_cast<int64_t>(i), members_[i].parameter);
}

void ParamGroup::attach(int64_t index) {
  const auto i = static_cast<size_t>(index);
  storages_[i].attach(members_[i].parameter, weight_.dtype(), shape_of(index));
}

void ParamGroup::bind(const FlatBuffer& whole) {
  auto* begin = static_cast<std::byte*>(whole.local().mutable_data_ptr());
  const int64_t width = element_bytes(types_.weight);
  for (size_t i = 0; i < storages_.size(); ++i)
    storages_[i].bind(begin + layout_.tensor_range(static_cast<int64_t>(i)).begin * width);
  is_bound_ = true;
}

void ParamGroup::unbind() {
  if (!std::exchange(is_bound_, false)) return;
  for (ParameterStorage& storage : storages_) storage.unbind();
}

void ParamGroup::start_gather(void* slab, const Tag& tag, const Work& after) {
  gather_ = after;
  if (std::exchange(is_stale_, false)) gather_ = refresh_.start(weight_, weight_, tag, gather_);
  if (!needs_slab()) return;
  whole_.lie_at(slab);
  gather_ = unshard_.start(weight_, whole_, tag, gather_);
}

void ParamGroup::wait_gather() {
  std::exchange(gather_, {}).wait();
  bind(needs_slab() ? whole_ : weight_);
}

bool ParamGroup::expect_newer() {
  is_stale_ |= refresh_.communicates();
  return is_stale_;
}

void ParamGroup::set_wire(DType wire, BucketSize bucket) {
  gradient_->set_wire(scalar_type_of(wire));
  if (bucket == BucketSize::kFollow) types_.wire = wire;
}

FlatRange ParamGroup::held_flat(int64_t index) const {
  const auto slices = layout_.tensor_slices(setting_.strategy.optimizer, setting_.rank, index);
  if (slices.empty()) return {};
  const int64_t begin = layout_.tensor_range(index).begin;
  return {begin + slices.front().range.begin, begin + slices.front().range.end};
}

FlatRange ParamGroup::held_of(int64_t index) const {
  const FlatRange held = held_flat(index);
  if (held.empty()) return {};
  const int64_t begin = layout_.tensor_range(index).begin;
  return {held.begin - begin, held.end - begin};
}

at::Tensor ParamGroup::main_weight_of(int64_t index) const {
  return main_weights_->at(held_flat(index));
}

at::Tensor ParamGroup::gradient_of(int64_t index) const {
  if (!gradient_ || !gradient_->main().is_allocated()) return {};
  return gradient_->main().at(held_flat(index));
}

}  // namespace fsdp
