#include "fsdp/shard/engine/missing_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"

namespace fsdp {

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
