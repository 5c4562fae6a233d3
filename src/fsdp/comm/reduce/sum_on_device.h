// Sums of all ranks' values on a CUDA device, in one pass: added in SumOrder in fp32, scaled,
// added to what is there, rounded once, and looked at. In builds without CUDA: an Error.
#pragma once

#include <cstdint>

#include "fsdp/base/compiler.h"
#include "fsdp/base/dtype.h"
#include "fsdp/comm/reduce/sum_order.h"
#include "fsdp/comm/reduce/sum_tree.h"

namespace fsdp {

// A kernel adds at most 2^kSumLevels - 1 values.
inline constexpr int kSumLevels = 13;

// All pointers are device memory. Plain bytes: it is a kernel's argument.
struct DeviceSum {
  static constexpr int kMaxListed = ReductionPieces::kMaxListed;

  // The contribution of each rank, in rank order: listed, or one after the other from `first` on.
  const void* listed[kMaxListed] = {};
  const void* first = nullptr;
  int64_t stride_bytes = 0;
  int32_t num_ranks = 1;

  void* output = nullptr;
  int64_t numel = 0;
  DType wire = DType::kFloat32;    // of the inputs
  DType result = DType::kFloat32;  // of the output

  float scale = 1.0f;
  bool adds = false;           // to the output, before rounding
  float* nonfinite = nullptr;  // becomes 1 where a stored value is NaN or Inf
  double* squares = nullptr;   // the sum of the squares of all stored values is added to it
  void* workspace = nullptr;   // device_sum_workspace_bytes(), zero at first; of one stream only
};

// Few numbers of many ranks, a row of each, one after the other: added in SumOrder by one launch,
// however many there are. Plain bytes, too.
template <typename Number>
struct RowSum {
  const Number* rows = nullptr;
  int64_t numel = 0;  // of a row
  int32_t ranks = 1;
  int32_t group = 1;  // divides `ranks`
  Number scale = 1;
  Number* sum = nullptr;

  FSDP_HOST_DEVICE Number at(int64_t i) const {
    SumTree<Number, kSumLevels> groups;
    const int32_t num_groups = ranks / group;
    for (int32_t begin = 0; begin < num_groups; ++begin) {
      SumTree<Number, kSumLevels> members;
      for (int32_t member = 0; member < group; ++member)
        members.add(rows[(begin * group + member) * numel + i], member);
      groups.add(members.total(group), begin);
    }
    return groups.total(num_groups) * scale;
  }
};

// Whether this build has the kernel, and whether it takes the type: fp32, bf16, fp16.
bool has_device_sums();
bool is_summed_on_device(DType dtype);

int64_t device_sum_workspace_bytes();

// Enqueued on `stream`, a cudaStream_t. The same bits in every run, and as reduce_ranks() computes.
void sum_on_device(const DeviceSum& sum, void* stream);
void sum_rows_on_device(const RowSum<float>& sum, void* stream);
void sum_rows_on_device(const RowSum<double>& sum, void* stream);

}  // namespace fsdp
