// Which libtorch types moments can be kept in.
#pragma once

#include <c10/core/ScalarType.h>

#include "fsdp/base/dtype.h"

namespace fsdp {

// UsageError naming the option for a type that moments cannot have.
DType moment_dtype(const char* field, at::ScalarType type);

}  // namespace fsdp
