#include "fsdp/layout/matrix_parts.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

namespace fsdp {

std::vector<OwnedMatrix> matrix_parts(std::span<const int64_t> shape,
                                      std::span<const int64_t> rows) {
  FSDP_ASSERT(shape.size() >= 2, "a tensor of ", shape.size(), " dims has no matrices");
  const int64_t columns = shape.back();
  int64_t all_rows = 1;
  for (const int64_t size : shape.first(shape.size() - 1)) all_rows = checked_mul(all_rows, size);
  const int64_t last_rows = shape[shape.size() - 2];
  std::vector<OwnedMatrix> parts;
  size_t next = 0;
  for (int64_t row = 0; row < all_rows;) {
    const int64_t of_this = rows.empty() ? last_rows : rows[next++ % rows.size()];
    FSDP_ASSERT(of_this > 0 && row + of_this <= all_rows, "a matrix of ", of_this, " rows at row ",
                row, " of ", all_rows);
    parts.push_back(
        {.range = {row * columns, (row + of_this) * columns}, .rows = of_this, .columns = columns});
    row += of_this;
  }
  return parts;
}

int64_t newton_schulz_flops(int64_t rows, int64_t columns) {
  const auto [m, n] = std::minmax(rows, columns);
  return checked_mul(checked_mul(2 * m, m), checked_add(2 * n, m));
}

int64_t newton_schulz_numel(int64_t rows, int64_t columns) {
  const int64_t m = std::min(rows, columns);
  return 2 * (rows * columns + m * m);
}

}  // namespace fsdp
