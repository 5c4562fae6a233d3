#include "fsdp/train/data_agreement.h"

#include <bit>
#include <exception>

#include "fsdp/base/check.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/data/token_header.h"

namespace fsdp::train {

void compare_data(const RunPlan& plan, const Mesh& mesh) {
  uint64_t mine = plan.corpus->fingerprint();
  if (plan.validation) mine ^= std::rotl(plan.validation->fingerprint(), 1);
  const auto first =
      static_cast<uint64_t>(number_of_rank_0(mesh, static_cast<int64_t>(mine), "data fingerprint"));
  std::exception_ptr error;
  if (mine != first)
    error = std::make_exception_ptr(Error(
        concat("rank ", rank_in(mesh), " reads other data than rank 0 (", fingerprint_text(mine),
               " and ", fingerprint_text(first), "); give all hosts the same files")));
  agree_on_success(mesh, error, "comparing the data");
}

void confirm_data(const RunPlan& plan, const Mesh& mesh) {
  std::exception_ptr error;
  try {
    plan.data_check->wait();
  } catch (...) {
    error = std::current_exception();
  }
  agree_on_success(mesh, error, "verifying the data");
}

}  // namespace fsdp::train
