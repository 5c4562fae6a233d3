#include "fsdp/checkpoint/rank_agreement.h"

#include <ATen/ATen.h>

#include <array>
#include <random>
#include <string_view>

#include "fsdp/base/text.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/rank_facts.h"

namespace fsdp {

namespace {

// Inner groups first, which informs all ranks of a row; then the outer ones inform all rows.
std::array<const MeshAxis*, 2> axes_of(const Mesh& mesh) { return {&mesh.inner(), &mesh.outer()}; }

bool is_remote(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RemoteError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

int64_t rank_in(const Mesh& mesh) {
  return int64_t{mesh.outer().rank()} * mesh.inner().size() + mesh.inner().rank();
}

void barrier(const Mesh& mesh, const std::string& tag) {
  for (const MeshAxis* axis : axes_of(mesh))
    if (axis->size() > 1) axis->reduce().barrier(tag).wait();
}

bool a_rank_has_failed(const Mesh& mesh) try {
  for (const MeshAxis* axis : axes_of(mesh)) axis->reduce().throw_if_aborted();
  return false;
} catch (const CommError&) {
  return true;
}

int64_t number_of_rank_0(const Mesh& mesh, int64_t mine, const std::string& tag) {
  at::Tensor number = at::full({1}, mine, at::kLong);
  // Outer first, so that every row's rank 0 knows the number.
  for (const MeshAxis* axis : {&mesh.outer(), &mesh.inner()})
    if (axis->size() > 1) axis->reduce().broadcast(number, 0, tag).wait();
  return number.item<int64_t>();
}

std::string drawn_id(const Mesh& mesh, const std::string& tag) {
  std::random_device random;
  const auto mine = static_cast<int64_t>(uint64_t{random()} << 32 | random());
  auto number = static_cast<uint64_t>(number_of_rank_0(mesh, mine, tag));
  std::string digits;
  for (int i = 0; i < 16; ++i, number >>= 4) digits.push_back("0123456789abcdef"[number & 15]);
  return digits;
}

std::string words_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    const std::string_view what = known.what();
    return std::string(what.substr(0, what.find('\n')));  // libtorch goes on with a stack trace
  } catch (...) {
    return "an unknown error";
  }
}

void agree_on_success(const Mesh& mesh, const std::exception_ptr& mine, const std::string& doing) {
  const int64_t rank = rank_in(mesh);
  const bool is_cause = mine && !is_remote(mine);
  // The rank that speaks for all: one with a cause, before those with its consequences.
  int64_t speaker = is_cause ? mesh.size() + rank : mine ? rank : -1;
  std::string words;
  try {
    at::Tensor greatest = at::full({1}, speaker, at::kLong);
    for (const MeshAxis* axis : axes_of(mesh))
      if (axis->size() > 1)
        axis->reduce().all_reduce(greatest, {.op = ReduceOp::kMax}, doing).wait();
    speaker = greatest.item<int64_t>();
    if (speaker < 0) return;
    speaker %= mesh.size();
    words = texts_of_ranks(mesh, mine ? words_of(mine) : "").at(static_cast<size_t>(speaker));
  } catch (const CommError&) {  // another rank has left meanwhile, perhaps because of this error
    if (mine) std::rethrow_exception(mine);
    throw;
  }
  if (is_cause || speaker == rank) std::rethrow_exception(mine);
  throw RemoteError(concat(doing, " failed on rank ", speaker, ": ", words));
}

}  // namespace fsdp
