// The mark of positions that predict nothing.
#pragma once

#include <cstdint>

namespace fsdp::nn {

inline constexpr int64_t kNoTarget = -100;

}  // namespace fsdp::nn
