// layout/flat_layout.h over random requests, with the checks the fuzzer uses.
#include <gtest/gtest.h>

#include <random>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "support/layout_checker.h"

namespace fsdp::flat_layout_random_test {
namespace {

std::string describe(const FlatLayoutRequest& request) {
  std::string shapes;
  for (const auto& shape : request.shapes) shapes += list_text(shape) + " ";
  return concat("element_bytes ", request.element_bytes, ", align_bytes ", request.align_bytes,
                ", inner_ranks ", request.inner_ranks, ", outer_ranks ", request.outer_ranks, ", ",
                to_text(request.granularity), ", shapes ", shapes);
}

std::vector<uint8_t> random_bytes(std::mt19937& random) {
  std::vector<uint8_t> bytes(64);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(FlatLayout, KeepsItsPromisesForRandomRequests) {
  std::mt19937 random(20240611);
  int num_checked = 0;
  int num_by_kind[4] = {};
  int num_with_matrices = 0;
  while (num_checked < 6000) {
    std::vector<uint8_t> bytes = random_bytes(random);
    if (testing::RequestReader(bytes).is_extreme()) bytes[0] = 0;
    const FlatLayoutRequest request = testing::RequestReader(bytes).read();
    const FlatLayout layout(request);
    ASSERT_EQ(testing::check_layout(layout), "") << describe(request);
    ++num_checked;
    ++num_by_kind[static_cast<int>(request.granularity.kind)];
    if (!request.matrix_rows.empty()) ++num_with_matrices;
  }
  for (const int count : num_by_kind) EXPECT_GT(count, 600) << "every granularity is drawn";
  EXPECT_GT(num_with_matrices, 150);
}

TEST(FlatLayout, RefusesOrPlansExtremeRequestsWithoutHarm) {
  std::mt19937 random(7);
  int num_planned = 0;
  int num_refused = 0;
  for (int i = 0; i < 10000; ++i) {
    std::vector<uint8_t> bytes = random_bytes(random);
    bytes[0] = 7;
    FlatLayoutRequest request = testing::RequestReader(bytes).read();
    // Most draws fail at the first field; mend it in half of them so that later ones are reached.
    if (i % 2 == 0) {
      request.element_bytes = 2;
      request.align_bytes = 128;
      request.inner_ranks = 1 + (request.inner_ranks & 1023);
      request.outer_ranks = 1 + (request.outer_ranks & 15);
    }
    try {
      const FlatLayout layout(request);
      ++num_planned;
    } catch (const Error& error) {
      EXPECT_STRNE(error.what(), "");
      ++num_refused;
    }
  }
  EXPECT_GT(num_planned, 250);
  EXPECT_GT(num_refused, 250);
}

}  // namespace
}  // namespace fsdp::flat_layout_random_test
