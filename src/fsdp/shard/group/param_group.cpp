#include "fsdp/shard/group/param_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/layout/state_bytes.h"
#include "fsdp/shard/engine/backward_errors.h"

namespace fsdp {

namespace {

GroupTypes types_of(const std::vector<GroupMember>& members, Trainable trainable,
                    const GroupSetting& setting) {
  return resolve_types(dtype_of(members.front().computes_in), setting.precision, trainable,
                       members.front().recipe);
}

// The error for touching a parameter while its unit is sharded, or one that has no numbers.
std::string sharded_sentence(const std::string& unit, const GroupMember& member) {
  if (member.recipe != WeightRecipe::kPlain)
    return concat("parameter '", member.names.front(), "' is quantised (",
                  row_of(member.recipe).name,
                  ") and has no numbers of its own; a module computes with "
                  "fsdp::quantized_weight(parameter), and the numbers are the main weights: "
                  "Sharded::parameters(), or a checkpoint");
  return concat("parameter '", member.names.front(), "' is touched while its unit '", unit,
                "' is sharded; use it inside the forward of a unit that holds it (a unit named in "
                "ShardOptions::units is called by fsdp::call_unit), or under "
                "Sharded::full_parameters()");
}

FlatBufferSpec weight_spec(PlacementPair placed, const GroupTypes& types,
                           const GroupSetting& setting) {
  return {.placed = placed,
          .rank = setting.rank,
          .dtype = types.is_quantized() ? at::kByte : scalar_type_of(types.weight),
          .device = setting.device};
}

}  // namespace

FlatLayoutRequest layout_request(const std::vector<GroupMember>& members, Trainable trainable,
                                 const GroupSetting& setting) {
  const GroupTypes types = types_of(members, trainable, setting);
  FlatLayoutRequest request{.shapes = {},
                            .element_bytes = narrowest_bytes(types),
                            .inner_ranks = setting.shape.inner,
                            .outer_ranks = setting.shape.outer,
                            .granularity = setting.granularity};
  // Blocks of moments that share a scale are cut by no shard, of any number of ranks.
  if (setting.has_lanes()) request.align_bytes = kScaleBlock * request.element_bytes;
  const bool has_matrices = !members.front().matrix_rows.empty();
  if (has_matrices) request.granularity = Granularity::tensor();
  for (const GroupMember& member : members) {
    request.shapes.push_back(owned_shape(member.owned, member.parameter.sizes()));
    if (has_matrices) request.matrix_rows.push_back(member.matrix_rows);
  }
  return request;
}

GroupBuckets ParamGroup::buckets() const {
  return group_buckets(
      layout_, types_, setting_.strategy, setting_.shape, row_of(setting_.kind).name,
      setting_.has_lanes() ? GradientSlab::kAlways : GradientSlab::kWhereExchanged);
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

ParamGroup::ParamGroup(std::string unit, std::vector<GroupMember> members, Trainable trainable,
                       const GroupSetting& setting, FlatLayoutRequest request)
    : unit_(std::move(unit)),
      setting_(setting),
      members_(std::move(members)),
      types_(types_of(members_, trainable, setting)),
      layout_(std::move(request)),
      paths_(group_paths(setting.strategy, setting.shape, setting.gradient, setting.num_losses,
                         setting.num_copies)),
      weight_(layout_, weight_spec(setting.strategy.parameter, types_, setting),
              &setting.memory.weight),
      whole_(layout_, weight_spec({}, types_, setting)),
      refresh_(layout_, setting.grid, setting.rank, paths_.refresh),
      unshard_(layout_, setting.grid, setting.rank, paths_.unshard) {
  weight_.allocate();
  for (size_t i = 0; i < members_.size(); ++i)
    storages_.emplace_back(
        layout_.tensor_range(static_cast<int64_t>(i)).numel() * element_bytes(types_.weight),
        setting.device, in_language_of_program(sharded_sentence(unit_, members_[i])));
  main_weights_.emplace(layout_, types_, setting, weight_);  // needs the weights' memory
  if (types_.trainable) gradient_.emplace(layout_, paths_, types_, setting);
  if (types_.is_quantized())
    quantized_.emplace(layout_, types_, setting_, paths_, *main_weights_, weight_);
  if (!needs_slab()) bind(weight_);
}

ParamGroup::~ParamGroup() {
  if (!quantized_) return;
  for (const GroupMember& member : members_) tag_quantized(member.parameter, nullptr);
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
  if (!quantized_) weight_.set(index, built.to(weight_.dtype()));
  main_weights_->set(layout_.tensor_range(index), built);
}

void ParamGroup::take_over_values() {
  if (quantized_) return;  // nobody could touch them
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const at::Tensor& given = members_[i].parameter;
    if (given.sizes() != shape_of(index) || given.device() != setting_.device)
      throw UsageError(concat("parameter '", name_of(index),
                              "' was given memory of another shape or ", "device, ",
                              list_text(given.sizes()), " on ", given.device().str(), "; it has ",
                              list_text(shape_of(index)), " on ", setting_.device.str()));
    set_owned_value(index, given);
    if (!storages_[i].is_attached()) {
      // Other ranks' part of a gathered weight lies in the slab, where the next reader looks.
      const at::Tensor value = given.detach();
      attach(index);
      const at::NoGradGuard no_grad;
      if (is_bound_) members_[i].parameter.detach().copy_(value);
    }
    storages_[i].expect_changes();
  }
}

void ParamGroup::check_members() const {
  if (quantized_) return;
  for (size_t i = 0; i < storages_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (!storages_[i].is_attached())
      throw UsageError(
          concat("parameter '", name_of(index),
                 "' was given other memory (parameter.data = ..., set_()), ",
                 "which training would neither update nor save; change values in place, under ",
                 "Sharded::full_parameters(kWrite)"));
    if (storages_[i].is_changed())
      throw UsageError(concat("parameter '", name_of(index), "' was changed in place outside of ",
                              "Sharded::full_parameters(kWrite), so main weights and other ranks ",
                              "do not know the change; make it there"));
    if (is_trainable() &&
        torch::autograd::impl::post_acc_grad_hooks(members_[i].parameter) != nullptr)
      throw UsageError(concat(
          "parameter '", name_of(index), "' has a post-accumulate-grad hook, which would see this ",
          "rank's gradient before it is reduced, and change weights that are gathered copies; ",
          "update with an optimizer after the backward"));
  }
}

void ParamGroup::give_views_nan() {
  static std::atomic<bool> has_warned = false;
  for (size_t i = 0; i < storages_.size(); ++i)
    if (storages_[i].give_views_nan() && !has_warned.exchange(true))
      log(LogLevel::kWarning, "a view of parameter '", name_of(static_cast<int64_t>(i)),
          "' lives on after its unit '", unit_,
          "' was sharded again, and reads NaN from here on (libtorch 2.13 and later throw); clone "
          "what is needed later");
}

void ParamGroup::attach(int64_t index) {
  const auto i = static_cast<size_t>(index);
  const at::Tensor& parameter = members_[i].parameter;
  storages_[i].attach(parameter, scalar_type_of(types_.weight), shape_of(index));
  if (quantized_) tag_quantized(parameter, [this, index] { return quantized_member(index); });
}

// Parameters without numbers stay unbound.
void ParamGroup::bind(const FlatBuffer& whole) {
  is_bound_ = true;
  if (quantized_) return;
  auto* begin = static_cast<std::byte*>(whole.local().mutable_data_ptr());
  const int64_t width = element_bytes(types_.weight);
  for (size_t i = 0; i < storages_.size(); ++i)
    storages_[i].bind(begin + layout_.tensor_range(static_cast<int64_t>(i)).begin * width);
}

void ParamGroup::unbind() {
  if (!std::exchange(is_bound_, false) || quantized_) return;
  for (ParameterStorage& storage : storages_) storage.unbind();
}

QuantizedWeight ParamGroup::quantized_member(int64_t index) {
  FSDP_CHECK(is_bound_, "parameter '", name_of(index), "' is used while its unit '", unit_,
             "' is sharded; use it inside the forward of a unit that holds it");
  return quantized_->weight(index, needs_slab() ? whole_ : weight_);
}

void ParamGroup::start_gather(void* slab, const Tag& tag, const Work& after) {
  gather_ = after;
  if (std::exchange(is_stale_, false)) {
    gather_ = refresh_.start(weight_, weight_, tag, gather_);
    if (quantized_) gather_ = quantized_->start_refresh(tag, gather_);
  }
  if (!needs_slab()) return;
  whole_.lie_at(slab);
  gather_ = unshard_.start(weight_, whole_, tag, gather_);
  if (quantized_)
    gather_ =
        quantized_->start_unshard(static_cast<std::byte*>(slab) + whole_.numel(), tag, gather_);
}

void ParamGroup::wait_gather() {
  std::exchange(gather_, {}).wait();
  bind(needs_slab() ? whole_ : weight_);
}

void ParamGroup::refresh() {
  if (quantized_)
    quantized_->quantize(unit_);
  else
    main_weights_->refresh();
}

void ParamGroup::drop_frozen_numbers() {
  if (!quantized_ || is_trainable()) return;
  quantized_->forget_values();
  main_weights_->drop();
}

bool ParamGroup::expect_newer() {
  is_stale_ |= refresh_.communicates();
  return is_stale_;
}

void ParamGroup::set_wire(DType wire, BucketSize bucket) {
  gradient_->set_wire(scalar_type_of(wire));
  if (bucket == BucketSize::kFollow) types_.wire = wire;
}

at::Tensor ParamGroup::gradient_of(int64_t index) const {
  if (!gradient_ || !gradient_->main().is_allocated()) return {};
  return gradient_->main().at(held_flat(index));
}

}  // namespace fsdp
