#include "fsdp/optim/moment_dtype.h"

#include "fsdp/base/error.h"

namespace fsdp {

DType moment_dtype(const char* field, at::ScalarType type) {
  if (type == at::kFloat) return DType::kFloat32;
  if (type == at::kBFloat16) return DType::kBFloat16;
  if (type == at::kHalf) return DType::kFloat16;
  if (type == at::kFloat8_e4m3fn) return DType::kFloat8E4M3;
  if (type == at::kFloat8_e5m2) return DType::kFloat8E5M2;
  throw UsageError(concat(field, " is ", c10::toString(type),
                          "; moments are kept in Float, BFloat16, Half, Float8_e4m3fn or "
                          "Float8_e5m2"));
}

}  // namespace fsdp
