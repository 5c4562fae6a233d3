// layout/box.h: flat ranges as boxes, against a walk over every element.
#include "fsdp/layout/box.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"
#include "support/layout_checker.h"

namespace fsdp::box_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

TEST(Boxes, SplitARangeOfAMatrixIntoHeadBodyAndTail) {
  // . . . 3 4
  // 5 6 7 8 9
  // 10 11 . . .
  const std::vector<int64_t> shape = {3, 5};
  EXPECT_THAT(boxes(shape, {3, 12}),
              ElementsAre(Box{{0, 3}, {1, 2}}, Box{{1, 0}, {1, 5}}, Box{{2, 0}, {1, 2}}));
  EXPECT_THAT(boxes(shape, {0, 15}), ElementsAre(Box{{0, 0}, {3, 5}}));
  EXPECT_THAT(boxes(shape, {5, 15}), ElementsAre(Box{{1, 0}, {2, 5}}));
  EXPECT_THAT(boxes(shape, {6, 8}), ElementsAre(Box{{1, 1}, {1, 2}}));
}

TEST(Boxes, NeedTwoNMinusOneAtMost) {
  // One element short at both ends of a 3-D tensor: row, rows, planes, rows, row.
  const std::vector<int64_t> shape = {4, 3, 5};
  EXPECT_THAT(
      boxes(shape, {1, 59}),
      ElementsAre(Box{{0, 0, 1}, {1, 1, 4}}, Box{{0, 1, 0}, {1, 2, 5}}, Box{{1, 0, 0}, {2, 3, 5}},
                  Box{{3, 0, 0}, {1, 2, 5}}, Box{{3, 2, 0}, {1, 1, 4}}));
}

TEST(Boxes, HandleScalarsAndEmptyRanges) {
  EXPECT_THAT(boxes({}, {0, 1}), ElementsAre(Box{}));
  EXPECT_EQ(Box{}.numel(), 1);
  EXPECT_THAT(boxes({}, {0, 0}), IsEmpty());
  EXPECT_THAT(boxes(std::vector<int64_t>{3, 0}, {0, 0}), IsEmpty());
  EXPECT_THAT(boxes(std::vector<int64_t>{3, 4}, {7, 7}), IsEmpty());
  EXPECT_THAT(boxes(std::vector<int64_t>{1, 1, 1}, {0, 1}), ElementsAre(Box{{0, 0, 0}, {1, 1, 1}}));
}

TEST(Boxes, CoverEveryRangeOfEverySmallShapeExactly) {
  int num_ranges = 0;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {},           {1},       {9},       {1, 7},    {7, 1},       {4, 5},         {1, 1},
           {2, 3, 4},    {3, 1, 5}, {1, 4, 3}, {4, 3, 1}, {2, 2, 2, 3}, {3, 1, 2, 2},   {1, 1, 6},
           {2, 1, 3, 2}, {5, 2, 2}, {3, 3, 3}, {0},       {2, 0, 3},    {2, 2, 2, 2, 2}}) {
    const int64_t numel = testing::product(shape);
    for (int64_t begin = 0; begin <= numel; ++begin) {
      for (int64_t end = begin; end <= numel; ++end) {
        ASSERT_EQ(testing::check_boxes(shape, {begin, end}), "");
        ++num_ranges;
      }
    }
  }
  EXPECT_GT(num_ranges, 2500);
}

TEST(Boxes, RefuseRangesOutsideTheTensor) {
  const std::vector<int64_t> shape = {2, 3};
  EXPECT_THAT(
      [&] {
        boxes(shape, {4, 7});
      },
      ThrowsMessage<Error>(HasSubstr("[4, 7) is not inside the 6 elements of shape [2, 3]")));
  EXPECT_THROW(boxes(shape, {-1, 2}), Error);
  EXPECT_THROW(boxes(shape, {3, 2}), Error);
}

}  // namespace
}  // namespace fsdp::box_test
