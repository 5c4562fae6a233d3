#include "fsdp/checkpoint/rank_agreement.h"

#include <ATen/ATen.h>

#include <array>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"

namespace fsdp {

namespace {

// Inner groups first, which informs all ranks of a row; then the outer ones inform all rows.
std::array<const MeshAxis*, 2> axes_of(const Mesh& mesh) { return {&mesh.inner(), &mesh.outer()}; }

}  // namespace

int64_t rank_in(const Mesh& mesh) {
  return int64_t{mesh.outer().rank()} * mesh.inner().size() + mesh.inner().rank();
}

void barrier(const Mesh& mesh, const std::string& tag) {
  for (const MeshAxis* axis : axes_of(mesh))
    if (axis->size() > 1) axis->reduce().barrier(tag).wait();
}

int64_t number_of_rank_0(const Mesh& mesh, int64_t mine, const std::string& tag) {
  at::Tensor number = at::full({1}, mine, at::kLong);
  // Outer first, so that every row's rank 0 knows the number.
  for (const MeshAxis* axis : {&mesh.outer(), &mesh.inner()})
    if (axis->size() > 1) axis->reduce().broadcast(number, 0, tag).wait();
  return number.item<int64_t>();
}

void agree_on_success(const Mesh& mesh, const std::exception_ptr& mine, const std::string& doing) {
  at::Tensor failed = at::full({1}, mine ? rank_in(mesh) : -1, at::kLong);
  for (const MeshAxis* axis : axes_of(mesh))
    if (axis->size() > 1) axis->reduce().all_reduce(failed, {.op = ReduceOp::kMax}, doing).wait();
  if (mine) std::rethrow_exception(mine);
  FSDP_CHECK(failed.item<int64_t>() < 0, doing, " failed on rank ", failed.item<int64_t>(),
             ", which says why");
}

}  // namespace fsdp
