#include "fsdp/nn/config/logit_memory.h"

#include <algorithm>

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

constexpr int64_t kRowMultiple = 16;  // products of matrices work on tiles

}  // namespace

int64_t rows_of_logit_chunk(const LogitShape& shape, int64_t budget_bytes) {
  const int64_t row_bytes =
      std::max<int64_t>(1, checked_mul(shape.vocabulary, shape.element_bytes));
  int64_t most = std::max<int64_t>(1, budget_bytes / row_bytes);
  if (most >= shape.rows) return shape.rows;
  if (most > kRowMultiple) most -= most % kRowMultiple;
  const int64_t even = ceil_div(shape.rows, ceil_div(shape.rows, most));
  return std::min(most, round_up(even, kRowMultiple));
}

}  // namespace fsdp
