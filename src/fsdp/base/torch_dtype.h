// The project's element types as libtorch's, and back.
#pragma once

#include <c10/core/ScalarType.h>

#include "fsdp/base/dtype.h"

namespace fsdp {

at::ScalarType scalar_type_of(DType dtype);

// Error for a type no buffer of ours can have (complex, bool, quantised, ...).
DType dtype_of(at::ScalarType type);

}  // namespace fsdp
