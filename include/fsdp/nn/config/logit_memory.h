// How many tokens have their logits in memory at once while a loss is computed.
#pragma once

#include <cstdint>

namespace fsdp {

// By default. In bf16 and with 152k tokens in the vocabulary these are 3,500 rows: products of
// matrices are as fast as with more, and the head's gradient, which every chunk reads and writes,
// is a small part of a chunk's time.
inline constexpr int64_t kDefaultLogitBytes = int64_t{1} << 30;

struct LogitShape {
  int64_t rows = 0;        // tokens
  int64_t vocabulary = 0;  // of this rank
  int64_t element_bytes = 0;
};

// Rows of each chunk but the last, which may have fewer: so few chunks as the bytes allow, and
// rows shared evenly among them in multiples of 16. At least 1, even if that takes more bytes; 0 if
// there are no rows.
int64_t rows_of_logit_chunk(const LogitShape& shape, int64_t budget_bytes);

}  // namespace fsdp
