#include "fsdp/base/torch_dtype.h"

#include <array>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

constexpr std::array<std::pair<DType, at::ScalarType>, 9> kPairs = {{
    {DType::kFloat64, at::kDouble},
    {DType::kFloat32, at::kFloat},
    {DType::kFloat16, at::kHalf},
    {DType::kBFloat16, at::kBFloat16},
    {DType::kFloat8E4M3, at::kFloat8_e4m3fn},
    {DType::kFloat8E5M2, at::kFloat8_e5m2},
    {DType::kInt64, at::kLong},
    {DType::kInt32, at::kInt},
    {DType::kUInt8, at::kByte},
}};

}  // namespace

at::ScalarType scalar_type_of(DType dtype) {
  for (const auto& [ours, theirs] : kPairs)
    if (ours == dtype) return theirs;
  FSDP_ASSERT(false, "dtype ", name_of(dtype), " has no libtorch type");
  return at::kFloat;
}

DType dtype_of(at::ScalarType type) {
  for (const auto& [ours, theirs] : kPairs)
    if (theirs == type) return ours;
  throw Error(concat("dtype ", c10::toString(type),
                     " cannot be sharded; use fp64, fp32, fp16, bf16, fp8, int64, int32 or uint8"));
}

}  // namespace fsdp
