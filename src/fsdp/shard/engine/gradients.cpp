#include "fsdp/shard/engine/gradients.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/dtype.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/shard/engine/backward_errors.h"

namespace fsdp {

namespace {

// Calls visit(unit, group) for every trainable group, in order.
void each_trainable(const ShardedUnits& units, const auto& visit) {
  for (const auto& unit : units)
    for (ParamGroup& group : unit->groups())
      if (group.is_trainable()) visit(*unit, group);
}

int world_rank(const Mesh& mesh) {
  return mesh.outer().rank() * mesh.inner().size() + mesh.inner().rank();
}

}  // namespace

Gradients::Gradients(const ShardOptions& options, c10::Device device, const Mesh& mesh,
                     const ShardedUnits& units, WireSlots& wire_slots, int64_t micro_steps)
    : options_(options),
      mesh_(mesh),
      units_(units),
      wire_slots_(wire_slots),
      micro_steps_(micro_steps),
      nonfinite_(at::zeros({1}, at::device(device).dtype(at::kFloat))),
      missing_(mesh, units, device) {}

void Gradients::complete() {
  each_trainable(units_, [&](const ShardedUnit&, const ParamGroup& group) {
    for (const GroupMember& member : group.members())
      stand_ins_.add(member.parameter, member.names.front());
  });
  reserve_wire_slots();
}

void Gradients::reserve_wire_slots() {
  int64_t bytes = 0;
  size_t num_slots = 0;
  each_trainable(units_, [&](const ShardedUnit&, const ParamGroup& group) {
    const GroupGradient::CastRoom room = group.gradient().cast_room();
    bytes = std::max(bytes, room.bytes);
    num_slots = std::max(num_slots, room.num_slots);
  });
  wire_slots_.reserve(bytes, num_slots);
}

// --- one backward --------------------------------------------------------------------------------

void Gradients::begin_backward() {
  check_cycle();
  count_unread_backward();
  stand_ins_.take();
  each_trainable(units_, [](const ShardedUnit&, ParamGroup& group) { group.gradient().reopen(); });
  is_last_ = micro_steps_ == 0 ? is_last_microbatch_ : microbatch_ + 1 == micro_steps_;
}

void Gradients::check_cycle() const {
  if (micro_steps_ > 0 && microbatch_ >= micro_steps_)
    throw UsageError(concat("lanes is ", options_.lanes, ", so a cycle has ", micro_steps_,
                            " backwards on each of these ranks, and all of them have come; call "
                            "zero_grad() before the next one"));
  each_trainable(units_, [](const ShardedUnit& unit, const ParamGroup& group) {
    FSDP_CHECK(!group.gradient().cycle().is_over, "the gradients of unit '", unit.name(),
               "' were already reduced in this cycle; call zero_grad() before the next backward, "
               "or run all but the last backward of a cycle under no_sync()");
  });
}

int32_t Gradients::num_units_with_slabs(const ShardedUnit& but) const {
  int32_t count = 0;
  const ShardedUnit* last = &but;
  for (const Reducing& each : reducing_) {
    if (each.unit == last || each.unit == &but) continue;
    ++count;
    last = each.unit;
  }
  return count;
}

// Takes memory for those groups of the unit that have not been reduced.
void Gradients::prepare(ShardedUnit& unit) {
  for (ParamGroup& group : unit.groups()) {
    if (!group.is_trainable() || group.gradient().phase() != GradientPhase::kResting) continue;
    std::optional<SlabLease>& lease = group.slabs().gradient;
    if (!lease) {
      FSDP_CHECK(!group.gradient().cycle().is_over, "a gradient of unit '", unit.name(),
                 "' came after the reduction that ends the cycle; run this backward under "
                 "no_sync(), and one more after it");
      group.gradient().begin_writing(nullptr);
      continue;
    }
    while (num_units_with_slabs(unit) >= kGradientSlots) wait_front();
    lease->acquire(SlabFrom::kPool);
    group.gradient().begin_writing(lease->address());
  }
}

// For a contribution after the reduction began (a repeated backward through a unit that is used
// twice): a second reduction adds it, at the end of the backward.
void Gradients::reopen(ParamGroup& group) {
  if (micro_steps_ > 0)
    throw UsageError(concat("a gradient of unit '", group.unit(),
                            "' came after that of its lane was added (a second backward through a "
                            "unit within one lane), which would depend on the number of ranks; "
                            "compute a lane's loss in one backward"));
  while (group.gradient().phase() == GradientPhase::kReducing) wait_front();
  group.gradient().reopen();
}

void Gradients::accept(ShardedUnit& unit, ParamGroup& group, int64_t member,
                       const at::Tensor& gradient) {
  GroupGradient& target = group.gradient();
  if (gradient.defined()) {
    if (target.is_reduced()) reopen(group);
    prepare(unit);
    target.accept(member, gradient);
  }
  // Checks the value as it will travel: it may be too large for the wire type.
  if (options_.report_nan == ReportNan::kOff) return;
  if (const at::Tensor written = target.written(member); written.defined())
    check_finite(group, member, written);
}

void Gradients::check_finite(const ParamGroup& group, int64_t member,
                             const at::Tensor& gradient) const {
  const bool is_finite = at::isfinite(gradient).all().item<bool>();
  FSDP_CHECK(is_finite, "the gradient of parameter '", group.name_of(member), "' of unit '",
             group.unit(), "' is not finite on rank ", world_rank(mesh_), " in microbatch ",
             microbatch_, "; it has not been sent to other ranks");
}

GroupGradient::Direct Gradients::direct_target(ShardedUnit& unit, ParamGroup& group, int64_t member,
                                               GradientType type) {
  GroupGradient& gradient = group.gradient();
  if (gradient.is_reduced()) return {};
  const at::ScalarType own = group.members()[static_cast<size_t>(member)].parameter.scalar_type();
  const bool widens = type == GradientType::kOrWider && (own == at::kBFloat16 || own == at::kHalf);
  if (!gradient.takes_direct(own) && !(widens && gradient.takes_direct(at::kFloat))) return {};
  prepare(unit);
  return gradient.direct(member);
}

void Gradients::reduce(ShardedUnit& unit, Which which) {
  for (ParamGroup& group : unit.groups()) {
    if (!group.is_trainable() || group.gradient().is_reduced()) continue;
    if (which == Which::kWithSlabs && !group.slabs().gradient) continue;
    reduce_group(unit, group);
  }
}

void Gradients::reduce_group(ShardedUnit& unit, ParamGroup& group) {
  RECORD_FUNCTION(unit.reduce_range(), {});
  prepare(unit);
  group.gradient().end_writing(nonfinite_, unit.reduce_tag());
  if (group.slabs().gradient)
    reducing_.push_back({&unit, &group});
  else if (is_last_)
    start_cycle_end(unit, group);
}

void Gradients::start_cycle_end(ShardedUnit& unit, ParamGroup& group) {
  group.gradient().start_cycle_reduction(nonfinite_, unit.reduce_tag());
  if (group.gradient().reduces_at_cycle_end()) completing_.push_back({&unit, &group});
}

void Gradients::wait_front() {
  const auto [unit, group] = reducing_.front();
  reducing_.pop_front();
  group->gradient().wait();
  group->slabs().gradient->release();
  if (is_last_ && group->gradient().reduces_at_cycle_end()) start_cycle_end(*unit, *group);
}

void Gradients::wait_all_but(const ShardedUnit& unit) {
  while (!reducing_.empty() && reducing_.front().unit != &unit) wait_front();
}

void Gradients::end_backward() {
  stand_ins_.put();
  ++microbatch_;
}

void Gradients::wait() {
  while (!reducing_.empty()) wait_front();
  while (!completing_.empty()) {
    completing_.front().group->gradient().wait();
    completing_.pop_front();
  }
  wire_slots_.end_cycle();
}

// --- one cycle -----------------------------------------------------------------------------------

void Gradients::zero() {
  wait();
  // Allows one cycle without a reader, which may be a rehearsal.
  if (waits_for_reader_ && microbatch_ > 0 && ++num_unread_cycles_ == 2)
    warn_unread("a second cycle's gradients are dropped by zero_grad()");
  each_trainable(units_, [](const ShardedUnit& unit, ParamGroup& group) {
    group.gradient().zero();
    if (!unit.is_updating()) group.gradient().release();
  });
  nonfinite_.zero_();
  microbatch_ = 0;
}

void Gradients::check_complete(const char* reader) const {
  if (!has_begun())
    throw UsageError(concat(reader,
                            " finds no gradients in this cycle; call backward() before it, ",
                            "and zero_grad() only after the step"));
  each_trainable(units_, [&](const ShardedUnit& unit, const ParamGroup& group) {
    if (group.gradient().is_complete()) return;
    check_lanes(reader);
    throw UsageError(
        concat(reader, " finds incomplete gradients of unit '", unit.name(),
               "': every backward of this cycle was announced as not the last one "
               "(no_sync()); run the last one outside, or end the cycle (end_cycle())"));
  });
}

void Gradients::check_lanes(const char* reader) const {
  if (micro_steps_ > 0 && microbatch_ < micro_steps_)
    throw UsageError(concat(reader, " comes after ", microbatch_,
                            " backwards of this cycle; lanes is ", options_.lanes, ", which are ",
                            micro_steps_, " backwards on each of these ranks"));
}

void Gradients::end_cycle(const char* reader) {
  if (!has_begun()) check_complete(reader);
  check_lanes(reader);
  expect_reader();
  each_trainable(units_, [&](ShardedUnit& unit, ParamGroup& group) {
    if (!group.gradient().is_complete()) start_cycle_end(unit, group);
  });
  wait();
}

void Gradients::detect_external_zero_grad() {
  const GradientStandIns::Missing missing = stand_ins_.missing();
  if (missing == GradientStandIns::Missing::kNone) return;
  FSDP_CHECK(missing == GradientStandIns::Missing::kAll || (microbatch_ == 0 && !has_any()),
             "grad() of parameter '", stand_ins_.name_of_missing(),
             "' was set or cleared by itself, but gradients of a sharded model lie in shards and "
             "begin a cycle together; call zero_grad() of the optimizer, of Sharded or of the "
             "whole model");
  stand_ins_.put();
  zero();
}

void Gradients::count_unread_backward() {
  constexpr int32_t kMany = 16;
  if (waits_for_reader_ && is_last_microbatch_ && micro_steps_ == 0 &&
      ++num_unread_backwards_ == kMany)
    warn_unread(concat(kMany, " backwards have come, none of them under no_sync()"));
}

void Gradients::warn_unread(const std::string& what) {
  waits_for_reader_ = false;  // once is enough
  if (world_rank(mesh_) != 0) return;
  log(LogLevel::kWarning,
      in_language_of_program(concat(
          what,
          ", and nobody has used a gradient since fully_shard(): nothing is trained without step() "
          "of an fsdp::AdamW or fsdp::SGD, or a reader of Sharded::parameters() or "
          "flat_shards()")));
}

bool Gradients::has_any() const {
  const std::vector<GradientCycle> all = cycles();
  return std::any_of(all.begin(), all.end(),
                     [](const GradientCycle& cycle) { return !cycle.is_empty(); });
}

std::vector<GradientCycle> Gradients::cycles() const {
  std::vector<GradientCycle> all;
  each_trainable(units_, [&](const ShardedUnit&, const ParamGroup& group) {
    all.push_back(group.gradient().cycle());
  });
  return all;
}

void Gradients::set_cycles(const std::vector<GradientCycle>& cycles) {
  if (micro_steps_ > 0 && !cycles.empty()) microbatch_ = cycles.front().num_backwards;
  auto next = cycles.begin();
  each_trainable(
      units_, [&](const ShardedUnit&, ParamGroup& group) { group.gradient().set_cycle(*next++); });
}

bool Gradients::found_nonfinite() {
  expect_reader();
  at::Tensor flag = nonfinite_.clone();
  each_trainable(units_, [&](const ShardedUnit&, const ParamGroup& group) {
    // One rank reduces nothing, so nothing has checked its gradients yet.
    const GroupGradient& gradient = group.gradient();
    const bool is_looked_at = group.slabs().gradient || gradient.reduces_at_cycle_end();
    // Sums of lanes are made after their reductions have looked.
    if (gradient.cycle().is_empty() || (is_looked_at && micro_steps_ == 0)) return;
    flag.add_(at::isfinite(gradient.main().local()).all().logical_not());
  });
  for (const MeshAxis* axis : {&mesh_.inner(), &mesh_.outer()})
    if (axis->size() > 1)
      axis->reduce().all_reduce(flag, {.op = ReduceOp::kMax}, "found_nonfinite").wait();
  return flag.item<float>() != 0.0f;
}

void Gradients::set_wire(const PrecisionPolicy& precision) {
  const auto wire_of = [&](const ParamGroup& group) {
    return resolve_types(group.types().weight, precision.types(), Trainable::kYes).wire;
  };
  each_trainable(units_, [&](const ShardedUnit&, const ParamGroup& group) {
    check_wire(group, wire_of(group));
  });
  const bool memory_is_fixed = options_.pool != PoolKind::kOnDemand;
  each_trainable(units_, [&](const ShardedUnit&, ParamGroup& group) {
    group.set_wire(wire_of(group), memory_is_fixed ? ParamGroup::BucketSize::kKeep
                                                   : ParamGroup::BucketSize::kFollow);
  });
  reserve_wire_slots();
}

void Gradients::check_wire(const ParamGroup& group, DType wire) const {
  FSDP_CHECK(group.gradient().cycle().is_empty(),
             "precision.grad_comm can change only between cycles; call zero_grad() first");
  const std::optional<SlabLease>& lease = group.slabs().gradient;
  if (!lease || options_.pool == PoolKind::kOnDemand) return;
  const int64_t bytes = group.layout().padded_numel() * element_bytes(wire);
  if (bytes <= lease->num_bytes()) return;
  throw UsageError(concat("precision.grad_comm ", name_of(wire), " needs ", bytes,
                          " bytes for the gradients of unit '", group.unit(), "', but pool ",
                          name_of(options_.pool), " has ", lease->num_bytes(),
                          "; fixed memory takes types as wide as the first one or narrower: begin "
                          "with the widest, or use pool on_demand"));
}

void Gradients::cancel() noexcept {
  reducing_.clear();
  completing_.clear();
  each_trainable(units_, [&](const ShardedUnit&, ParamGroup& group) {
    group.gradient().cancel();
    if (group.slabs().gradient) group.slabs().gradient->cancel();
  });
  wire_slots_.end_cycle();
}

void Gradients::reset() {
  cancel();
  nonfinite_.zero_();
  microbatch_ = 0;
  is_last_microbatch_ = true;
}

// --- missing gradients ---------------------------------------------------------------------------

void MissingGradients::find() {
  for (const GridKind grid : mesh_.grids()) find(grid);
}

void MissingGradients::find(GridKind kind) {
  std::vector<std::pair<GroupGradient*, int64_t>> members;
  std::vector<float> came;
  for (const auto& unit : units_)
    for (ParamGroup& group : unit->groups()) {
      if (!group.is_trainable() || row_of(group.setting().kind).grid != kind) continue;
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
        members.emplace_back(&group.gradient(), i);
        came.push_back(group.gradient().came(i) ? 1.0f : 0.0f);
      }
    }
  const bool all_came = std::find(came.begin(), came.end(), 0.0f) == came.end();
  OfGrid& of = grids_[static_cast<size_t>(kind)];
  if (is_recording_) {
    FSDP_CHECK(all_came || came == of.came,
               "a graph cannot record a step in which gradients come to other parameters than in "
               "the step before; run the steps without a graph");
  } else if (!came.empty()) {
    of.came = std::move(came);
    of.missing = ask_others(of, mesh_.grid(kind), all_came);
  }
  if (all_came || of.missing.empty()) return;
  for (size_t i = 0; i < members.size(); ++i)
    members[i].first->set_missing(members[i].second, of.missing[i]);
}

// Every rank tells, but only one that lacks a gradient waits for the answer: where all came, none
// is missing. So the usual step waits for nothing.
std::vector<bool> MissingGradients::ask_others(OfGrid& of, const Grid& grid, bool all_came) const {
  const at::Tensor own = at::tensor(of.came);
  at::Tensor sum = own;
  std::exchange(of.telling, {}).wait();  // of the step before, whose memory is used again
  for (const MeshAxis* axis : {grid.inner, grid.outer, grid.owners}) {
    if (axis == nullptr || axis->size() == 1) continue;
    if (!sum.is_same(of.num_ranks)) {
      if (!of.num_ranks.defined()) of.num_ranks = at::empty_like(own, at::device(device_));
      sum = all_came ? of.num_ranks.fill_(1.0) : of.num_ranks.copy_(own);
    }
    of.telling = axis->reduce().all_reduce(sum, {}, "missing gradients", of.telling);
  }
  if (all_came) return {};
  of.telling.wait();
  const at::Tensor counts = sum.cpu();
  std::vector<bool> missing;
  for (int64_t i = 0; i < counts.numel(); ++i)
    missing.push_back(counts.const_data_ptr<float>()[i] == 0.0f);
  return missing;
}

}  // namespace fsdp
