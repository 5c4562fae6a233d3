// layout/row_packing.h: where a tensor goes so that cuts fall between its bricks.
#include "fsdp/layout/row_packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::segment_packer_test {
namespace {

using ::testing::ElementsAre;

std::vector<int64_t> positions_of(const SegmentPacker& packer) {
  std::vector<int64_t> positions;
  for (const SegmentPacker::Placed& placed : packer.placed()) positions.push_back(placed.position);
  return positions;
}

BrickedTensor tensor(int64_t numel, int64_t brick_numel) {
  return {.tensor = 0, .numel = numel, .brick_numel = brick_numel};
}

TEST(SegmentPacker, MovesATensorUntilItsOnlyCutIsBetweenBricks) {
  SegmentPacker packer(10, 3);
  EXPECT_TRUE(packer.place(tensor(5, 5)));
  EXPECT_TRUE(packer.place(tensor(12, 4)));  // not at 5, where the cut at 10 splits a brick
  EXPECT_THAT(positions_of(packer), ElementsAre(0, 6));
}

TEST(SegmentPacker, RefusesSeveralCutsUnlessTheShareIsAMultipleOfTheBrick) {
  SegmentPacker packer(10, 4);
  EXPECT_FALSE(packer.place(tensor(24, 4)));
  EXPECT_TRUE(packer.place(tensor(25, 5)));
  EXPECT_THAT(positions_of(packer), ElementsAre(0));
}

TEST(SegmentPacker, SkipsToTheNextShareWhenATensorMustStayWhole) {
  SegmentPacker packer(10, 3);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(packer.place(tensor(7, 7)));
  EXPECT_THAT(positions_of(packer), ElementsAre(0, 10, 20));
  EXPECT_FALSE(packer.place(tensor(7, 7)));
}

TEST(SegmentPacker, FillsTheFirstGapAfterATwinWasRefusedThere) {
  SegmentPacker packer(10, 3);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(packer.place(tensor(7, 7)));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(packer.place(tensor(3, 3)));
  EXPECT_THAT(positions_of(packer), ElementsAre(0, 10, 20, 7, 17, 27));
  EXPECT_FALSE(packer.place(tensor(1, 1))) << "full";
}

TEST(PackSegment, FindsTheShortestMultipleOfTheUnit) {
  // 11 bricks of 4 and one of 6 on 3 ranks: 50 elements; shares of 17 split bricks, 20 do not.
  const std::vector<BrickedTensor> tensors = {tensor(44, 4), tensor(6, 6)};
  const auto packer = pack_segment(tensors, 4, 1, 3, INT64_MAX);
  ASSERT_TRUE(packer.has_value());
  EXPECT_EQ(packer->share_numel(), 20);
  EXPECT_FALSE(pack_segment(tensors, 4, 1, 3, 19).has_value());
  EXPECT_TRUE(pack_segment(tensors, 4, 1, 3, 20).has_value());
}

}  // namespace
}  // namespace fsdp::segment_packer_test
