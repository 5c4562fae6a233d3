// checkpoint/format/tensor_boxes.h: boxes of a model tensor, cut where the tensor is divided.
#include "fsdp/checkpoint/format/tensor_boxes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"
#include "fsdp/checkpoint/names/name_rules.h"

namespace fsdp::tensor_sections_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

// [4, 3] as two halves of two rows.
std::vector<TensorSection> halves() {
  return {{.name = "fc1_w", .shape = {2, 3}, .offsets = {0, 0}},
          {.name = "fc1_v", .shape = {2, 3}, .offsets = {2, 0}}};
}

TEST(TensorSections, CutABoxThatStraddlesTwoOfThem) {
  EXPECT_THAT(cut_at_sections(halves(), Box{{1, 0}, {2, 3}}),
              ElementsAre(SectionBox{0, Box{{1, 0}, {1, 3}}, Box{{1, 0}, {1, 3}}},
                          SectionBox{1, Box{{0, 0}, {1, 3}}, Box{{2, 0}, {1, 3}}}));
}

// The drawing in tensor_boxes.h: from the last element of row 1 to the end of row 2.
TEST(TensorSections, CutAShardThatBeginsInMidRow) {
  const std::vector<int64_t> shape = {4, 3};
  std::vector<SectionBox> parts;
  for (const Box& box : boxes(shape, {5, 9}))
    for (const SectionBox& part : cut_at_sections(halves(), box)) parts.push_back(part);
  EXPECT_THAT(parts, ElementsAre(SectionBox{0, Box{{1, 2}, {1, 1}}, Box{{1, 2}, {1, 1}}},
                                 SectionBox{1, Box{{0, 0}, {1, 3}}, Box{{2, 0}, {1, 3}}}));
}

TEST(TensorSections, LeaveOutWhatABoxHasNothingOf) {
  EXPECT_THAT(cut_at_sections(halves(), Box{{3, 1}, {1, 2}}),
              ElementsAre(SectionBox{1, Box{{1, 1}, {1, 2}}, Box{{3, 1}, {1, 2}}}));
  EXPECT_THAT(cut_at_sections(halves(), Box{{2, 0}, {0, 3}}), IsEmpty());
}

TEST(TensorSections, AreOneForATensorWithoutRules) {
  const NameRules none;
  const std::vector<int64_t> shape = {4, 3};
  const std::vector<TensorSection> sections = none.sections("fc1", shape);
  ASSERT_THAT(sections, ElementsAre(TensorSection{"fc1", {4, 3}, {0, 0}}));
  const Box box{{1, 2}, {1, 1}};
  EXPECT_THAT(cut_at_sections(sections, box), ElementsAre(SectionBox{0, box, box}));
}

TEST(TensorSections, HoldScalarsAndEmptyTensors) {
  const NameRules none;
  const std::vector<TensorSection> scalar = none.sections("scale", {});
  ASSERT_THAT(scalar, ElementsAre(TensorSection{"scale", {}, {}}));
  EXPECT_THAT(cut_at_sections(scalar, Box{}), ElementsAre(SectionBox{0, Box{}, Box{}}));

  const std::vector<TensorSection> empty = none.sections("none", std::vector<int64_t>{0, 3});
  ASSERT_THAT(empty, ElementsAre(TensorSection{"none", {0, 3}, {0, 0}}));
  EXPECT_THAT(cut_at_sections(empty, Box{{0, 0}, {0, 3}}), IsEmpty());
}

TEST(TensorSections, RefuseABoxOutsideTheTensor) {
  EXPECT_THAT(
      [] {
        cut_at_sections(halves(), Box{{3, 0}, {2, 3}});
      },
      ThrowsMessage<Error>(HasSubstr("[3, 0] with sizes [2, 3] shares 3 elements with the "
                                     "sections of its tensor instead of 6")));
  EXPECT_THAT(
      [] {
        cut_at_sections(halves(), Box{{3}, {1}});
      },
      ThrowsMessage<Error>(HasSubstr("a box of 1 dims cannot be cut at section 'fc1_w'")));
}

}  // namespace
}  // namespace fsdp::tensor_sections_test
