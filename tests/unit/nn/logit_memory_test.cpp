// How many rows of logits fit into a number of bytes.
#include "fsdp/nn/config/logit_memory.h"

#include <gtest/gtest.h>

namespace fsdp::logit_memory_test {
namespace {

int64_t chunk(int64_t rows, int64_t fitting) {
  return rows_of_logit_chunk({.rows = rows, .vocabulary = 1000, .element_bytes = 2},
                             fitting * 2000 + 1999);
}

TEST(LogitMemory, SharesRowsEvenlyAmongAsFewChunksAsFit) {
  EXPECT_EQ(chunk(0, 5), 0);
  EXPECT_EQ(chunk(33, 100), 33);
  EXPECT_EQ(chunk(100, 31), 16);  // 6 and 4 rows: multiples of 16
  EXPECT_EQ(chunk(100, 64), 64);  // 50 would be no multiple
  EXPECT_EQ(chunk(8192, 8000), 4096);
  EXPECT_EQ(chunk(8192, 3500), 2736);  // three
  EXPECT_EQ(chunk(100, 0), 1);
  EXPECT_EQ(chunk(100, 7), 7);
}

TEST(LogitMemory, StaysWithinTheBytes) {
  for (int64_t rows = 1; rows < 300; ++rows)
    for (int64_t fitting = 1; fitting < 300; ++fitting) {
      const int64_t step = chunk(rows, fitting);
      ASSERT_LE(step, fitting);
      ASSERT_GE(step, 1);
      ASSERT_TRUE(step == rows || step <= 16 || step % 16 == 0) << step;
    }
}

}  // namespace
}  // namespace fsdp::logit_memory_test
