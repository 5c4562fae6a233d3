// layout/box.h: flat ranges of tensors and of slices as boxes, against a walk over every element.
#include "fsdp/layout/box.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

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

TEST(Boxes, HandleScalarsAndEmptyRanges) {
  EXPECT_THAT(boxes({}, {0, 1}), ElementsAre(Box{}));
  EXPECT_EQ(Box{}.numel(), 1);
  EXPECT_THAT(boxes(std::vector<int64_t>{3, 4}, {7, 7}), IsEmpty());
  EXPECT_THAT(owned_boxes(OwnedSlice{}, {}, {0, 1}), ElementsAre(OwnedBox{}));
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

// --- slices that ranks own ----------------------------------------------------------------------

// Element `at` of a box, counted in its own order, as a flat position in a tensor of `shape`.
int64_t position(const Box& box, std::span<const int64_t> shape, int64_t at) {
  int64_t flat = 0, stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    flat += (box.offsets[d] + at % box.sizes[d]) * stride;
    at /= box.sizes[d];
    stride *= shape[d];
  }
  return flat;
}

// Flat positions in the whole tensor by those in the slice, the slow way: every element of the
// whole is looked at, and those of this rank are counted.
std::vector<int64_t> walked(const OwnedSlice& slice, const std::vector<int64_t>& whole) {
  std::vector<int64_t> owned;
  int64_t below = 1;
  for (size_t d = static_cast<size_t>(slice.dim) + 1; d < whole.size(); ++d) below *= whole[d];
  for (int64_t flat = 0; flat < testing::product(whole); ++flat) {
    int64_t at = flat / below % whole[static_cast<size_t>(slice.dim)];
    for (const int64_t section : slice.sections) {
      if (at < section && at / (section / slice.count) == slice.index) owned.push_back(flat);
      if (at < section) break;
      at -= section;
    }
  }
  return owned;
}

TEST(OwnedSlice, HasItsPartOfEverySection) {
  const OwnedSlice slice{.index = 1, .count = 2, .dim = 0, .sections = {2, 4}};
  EXPECT_THAT(owned_shape(slice, std::vector<int64_t>{6, 5}), ElementsAre(3, 5));
  EXPECT_THAT(whole_shape(slice, std::vector<int64_t>{3, 5}), ElementsAre(6, 5));
  EXPECT_THAT(owned_parts(slice), ElementsAre(FlatRange{1, 2}, FlatRange{4, 6}));
  // Row 0 without its first element is of the first section, rows 1 and 2 are of the second one.
  EXPECT_THAT(owned_boxes(slice, std::vector<int64_t>{3, 5}, {1, 15}),
              ElementsAre(OwnedBox{{{0, 1}, {1, 4}}, {{1, 1}, {1, 4}}},
                          OwnedBox{{{1, 0}, {2, 5}}, {{4, 0}, {2, 5}}}));
}

TEST(OwnedSlice, CoversEveryRangeExactly) {
  struct Row {
    std::vector<int64_t> whole;
    int64_t dim, count;
    std::vector<int64_t> sections;
  };
  const std::vector<Row> rows = {{{8}, 0, 4, {8}},          {{8, 3}, 0, 2, {4, 4}},
                                 {{3, 8}, 1, 2, {8}},       {{3, 8}, 1, 2, {2, 6}},
                                 {{2, 4, 3}, 1, 2, {4}},    {{2, 3, 6}, 2, 3, {3, 3}},
                                 {{6, 2, 2}, 0, 2, {2, 4}}, {{4, 1}, 0, 4, {4}}};
  for (const Row& row : rows)
    for (int64_t index = 0; index < row.count; ++index) {
      const OwnedSlice slice{index, row.count, row.dim, row.sections};
      const std::vector<int64_t> expected = walked(slice, row.whole);
      const std::vector<int64_t> owned = owned_shape(slice, row.whole);
      ASSERT_EQ(static_cast<int64_t>(expected.size()), testing::product(owned));
      for (int64_t begin = 0; begin < testing::product(owned); ++begin)
        for (int64_t end = begin; end <= testing::product(owned); ++end) {
          std::map<int64_t, int64_t> whole_by_owned;
          for (const OwnedBox& box : owned_boxes(slice, owned, {begin, end})) {
            ASSERT_EQ(box.owned.sizes, box.whole.sizes);
            for (int64_t i = 0; i < box.owned.numel(); ++i)
              EXPECT_TRUE(
                  whole_by_owned
                      .emplace(position(box.owned, owned, i), position(box.whole, row.whole, i))
                      .second);
          }
          ASSERT_EQ(static_cast<int64_t>(whole_by_owned.size()), end - begin);
          for (const auto& [at, in_whole] : whole_by_owned) {
            EXPECT_TRUE(begin <= at && at < end);
            EXPECT_EQ(in_whole, expected[static_cast<size_t>(at)]);
          }
        }
    }
}

}  // namespace
}  // namespace fsdp::box_test
