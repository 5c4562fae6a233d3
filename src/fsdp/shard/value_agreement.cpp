#include "fsdp/shard/value_agreement.h"

#include <ATen/ATen.h>

#include "fsdp/base/error.h"

namespace fsdp {

namespace {

at::Tensor bits_of(const at::Tensor& flat) {
  switch (flat.element_size()) {
    case 1:
      return flat.view(at::kByte);
    case 2:
      return flat.view(at::kShort);
    case 4:
      return flat.view(at::kInt);
    default:
      return flat.view(at::kLong);
  }
}

// The sum of the elements' bits, exact and without regard to the order of summation.
at::Tensor checksum(const at::Tensor& value) {
  // Piece by piece: on the CPU a wide sum of narrow numbers makes a wide copy of them first.
  constexpr int64_t kPiece = int64_t{1} << 20;
  const at::Tensor bits = bits_of(value.detach().contiguous().view({-1}));
  at::Tensor sum = at::zeros({}, bits.options().dtype(at::kLong));
  for (const at::Tensor& piece : bits.split(kPiece)) sum += piece.sum(at::kLong);
  return sum;
}

}  // namespace

bool ValueAgreement::are_made_here() const {
  return from_ == InitialValues::kOfEveryRank ||
         (mesh_.outer().rank() == 0 && mesh_.inner().rank() == 0);
}

at::Tensor ValueAgreement::agree_on(const at::Tensor& value, const std::string& name) {
  if (mesh_.size() == 1) return value;
  if (from_ == InitialValues::kOfEveryRank) {
    names_.push_back(name);
    checksums_.push_back(checksum(value));
    return value;
  }
  const at::Tensor agreed = value.detach().contiguous();
  // Down the column of rank 0, then along every row.
  for (const MeshAxis* axis : {&mesh_.outer(), &mesh_.inner()})
    if (axis->size() > 1) axis->gather().broadcast(agreed, 0, name).wait();
  return agreed;
}

void ValueAgreement::check_agreement() const {
  if (checksums_.empty()) return;
  const at::Tensor own = at::stack(checksums_);
  at::Tensor lowest = own.clone();
  at::Tensor highest = own.clone();
  for (const MeshAxis* axis : {&mesh_.inner(), &mesh_.outer()}) {
    if (axis->size() == 1) continue;
    axis->gather().all_reduce(lowest, {.op = ReduceOp::kMin}, "initial values").wait();
    axis->gather().all_reduce(highest, {.op = ReduceOp::kMax}, "initial values").wait();
  }
  const at::Tensor differs = lowest.ne(highest).cpu();
  for (size_t i = 0; i < names_.size(); ++i)
    FSDP_CHECK(!differs[static_cast<int64_t>(i)].item<bool>(), "parameter '", names_[i],
               "' has different values on different ranks; build the model from the same seed or "
               "file everywhere, or set initial_values to kOfRankZero");
}

}  // namespace fsdp
