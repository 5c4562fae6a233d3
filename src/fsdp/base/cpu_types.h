// Which narrow types this machine's CPU multiplies with instructions of its own.
#pragma once

#include "fsdp/base/dtype.h"

namespace fsdp {

struct CpuTypes {
  bool has_bfloat16 = false;
  bool has_float16 = false;
};

// Asked once. Other kinds of machines have neither.
CpuTypes this_cpu();

// Whether libtorch's products of this type are about as fast as fp32 ones there.
bool is_quick_on(const CpuTypes& cpu, DType dtype);

}  // namespace fsdp
