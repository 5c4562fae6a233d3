// An optimizer's state by names, for checkpoints.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/optim/optimizer_impl.h"

namespace fsdp {

namespace {

// The argument of set_shards(), by parameter and name.
using Given = std::map<std::pair<std::string, std::string>, const OptimizerShard*>;

const OptimizerShard* find(const Given& given, const std::string& parameter,
                           const std::string& name) {
  const auto it = given.find({parameter, name});
  return it == given.end() ? nullptr : it->second;
}

void check_fits(const OptimizerShard& shard, FlatRange held) {
  const int64_t numel = shard.values.defined() ? shard.values.numel() : 0;
  if (numel == held.numel() && (held.empty() || shard.begin == held.begin)) return;
  throw UsageError(concat(shard.name, " of '", shard.parameter, "' is given for elements [",
                          shard.begin, ", ", shard.begin + numel, "), but this rank has [",
                          held.begin, ", ", held.end,
                          "); state of another number of ranks or strategy must be sharded again "
                          "first"));
}

}  // namespace

std::vector<OptimizerShard> Optimizer::Impl::shards_of(const GroupUpdate& update) const {
  const ParamGroup& group = update.group();
  std::vector<OptimizerShard> shards;
  for (size_t which = 0; which < update.moments().size(); ++which) {
    for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
      const FlatRange held = group.held_of(i);
      shards.push_back({.parameter = group.name_of(i),
                        .name = update.moments()[which].name,
                        .shape = group.shape_of(i),
                        .begin = held.begin,
                        .values = at::empty({held.numel()}, at::kFloat),
                        .kept_in = update.moments()[which].dtype});
      update.read_moment(which, group.held_flat(i), shards.back().values.mutable_data_ptr<float>());
    }
  }
  return shards;
}

std::vector<OptimizerShard> Optimizer::Impl::shards() const {
  wait();
  std::vector<OptimizerShard> all;
  for (const UnitUpdate& unit : units_)
    for (const GroupUpdate& update : unit.groups)
      for (OptimizerShard& shard : shards_of(update)) all.push_back(std::move(shard));
  return all;
}

void Optimizer::Impl::set_shards(std::span<const OptimizerShard> shards) {
  wait();
  Given given;
  for (const OptimizerShard& shard : shards) given[{shard.parameter, shard.name}] = &shard;

  // Checks everything before it changes anything.
  Given unknown = given;
  std::vector<std::string> names;
  for (const UnitUpdate& unit : units_)
    for (const GroupUpdate& update : unit.groups)
      for (int64_t i = 0; i < update.group().layout().num_tensors(); ++i) {
        names.push_back(update.group().name_of(i));
        for (const MomentKind& moment : update.moments()) {
          if (const OptimizerShard* shard = find(given, names.back(), moment.name))
            check_fits(*shard, update.group().held_of(i));
          unknown.erase({names.back(), moment.name});
        }
      }
  if (!unknown.empty()) {
    const auto& [parameter, name] = unknown.begin()->first;
    const bool is_known = std::find(names.begin(), names.end(), parameter) != names.end();
    const std::string guess = is_known ? std::string() : nearest(parameter, names);
    throw UsageError(concat(rule_.name, " has no ", name, " of '", parameter, "'",
                            guess.empty() ? "" : concat("; did you mean '", guess, "'?")));
  }
  for (GroupUpdate* update : group_updates())
    for (size_t which = 0; which < update->moments().size(); ++which)
      for (int64_t i = 0; i < update->group().layout().num_tensors(); ++i)
        if (const OptimizerShard* shard =
                find(given, update->group().name_of(i), update->moments()[which].name);
            shard != nullptr && shard->values.defined()) {
          const at::Tensor values = shard->values.to(at::kCPU, at::kFloat).contiguous();
          update->set_moment(which, update->group().held_flat(i), values.const_data_ptr<float>());
        }
}

std::map<std::string, int64_t> Optimizer::Impl::late_updates() {
  const int64_t step = state().step;
  std::map<std::string, int64_t> late;
  for (const GroupUpdate* update : group_updates())
    for (int64_t i = 0; i < update->group().layout().num_tensors(); ++i)
      if (const int64_t updates = update->updates_of(i, step); updates != step)
        late[update->group().name_of(i)] = updates;
  return late;
}

void Optimizer::Impl::set_late_updates(const std::map<std::string, int64_t>& updates) {
  wait();
  const int64_t step = state().step;
  for (GroupUpdate* update : group_updates())
    for (int64_t i = 0; i < update->group().layout().num_tensors(); ++i) {
      const auto late = updates.find(update->group().name_of(i));
      update->set_updates_of(i, late == updates.end() ? step : late->second, step);
    }
}

std::vector<std::string> Optimizer::Impl::moment_names() const {
  std::vector<std::string> names;
  for (const MomentKind& moment : rule_.moments) names.push_back(moment.name);
  if (rule_.matrices) names.push_back(rule_.matrices->momentum_kind.name);
  return names;
}

std::vector<GroupUpdate*> Optimizer::Impl::group_updates() {
  std::vector<GroupUpdate*> updates;
  for (UnitUpdate& unit : units_)
    for (GroupUpdate& update : unit.groups) updates.push_back(&update);
  return updates;
}

}  // namespace fsdp
