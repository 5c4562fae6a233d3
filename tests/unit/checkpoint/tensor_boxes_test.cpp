// Boxes of tensors: runs between memories, sections, and fused tensors cut into sections and back.
#include "fsdp/checkpoint/format/tensor_boxes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "support/layout_checker.h"

namespace fsdp::tensor_boxes_test {
namespace {

using ::testing::ElementsAre;
using Indices = std::vector<int64_t>;
using Random = std::mt19937_64;
using Values = std::vector<int64_t>;
// Stored sections by name, as a checkpoint holds them.
using Store = std::map<std::string, Values>;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

Indices random_shape(Random& random) {
  Indices shape(static_cast<size_t>(draw(random, 0, 4)));
  for (int64_t& size : shape) size = draw(random, 0, 19) == 0 ? 0 : draw(random, 1, 5);
  return shape;
}

Box random_box(Random& random, const Indices& shape) {
  Box box;
  for (const int64_t size : shape) {
    // Mostly all of a dim, so that boxes meet and runs span dims.
    const bool is_whole = draw(random, 0, 2) > 0;
    box.offsets.push_back(is_whole ? 0 : draw(random, 0, size));
    const int64_t left = size - box.offsets.back();
    box.sizes.push_back(is_whole ? left : draw(random, 0, left));
  }
  return box;
}

// A box inside a larger row-major array, of which some dims are no larger than the box.
struct Memory {
  StridedBox place;
  std::vector<int64_t> values;
};

Memory random_memory(Random& random, const Box& box) {
  Indices around = box.sizes;
  int64_t numel = 1;
  for (int64_t& size : around) {
    if (draw(random, 0, 2) == 0) size += draw(random, 0, 2);
    numel *= size;
  }
  Memory memory{{box, strides_of(around), draw(random, 0, 9)}, {}};
  memory.values.resize(static_cast<size_t>(numel + memory.place.begin), -1);
  return memory;
}

// The other order of dims: nothing but single elements is contiguous.
Memory transposed_memory(Random& random, const Box& box) {
  Indices reversed(box.sizes.rbegin(), box.sizes.rend());
  Indices strides = strides_of(reversed);
  std::reverse(strides.begin(), strides.end());
  Memory memory{{box, strides, draw(random, 0, 9)}, {}};
  memory.values.resize(static_cast<size_t>(box.numel() + memory.place.begin), -1);
  return memory;
}

Memory any_memory(Random& random, const Box& box) {
  return draw(random, 0, 4) == 0 ? transposed_memory(random, box) : random_memory(random, box);
}

template <typename Visit>
void for_each_element(const Box& box, const Visit& visit) {
  Indices index = box.offsets;
  for (int64_t i = 0; i < box.numel(); ++i) {
    visit(index);
    for (size_t d = index.size(); d-- > 0;) {
      if (++index[d] < box.offsets[d] + box.sizes[d]) break;
      index[d] = box.offsets[d];
    }
  }
}

bool contains(const Box& box, const Indices& index) {
  for (size_t d = 0; d < index.size(); ++d)
    if (index[d] < box.offsets[d] || index[d] >= box.offsets[d] + box.sizes[d]) return false;
  return true;
}

int64_t& element(Memory& memory, const Indices& index) {
  int64_t at = memory.place.begin;
  for (size_t d = 0; d < index.size(); ++d)
    at += (index[d] - memory.place.box.offsets[d]) * memory.place.strides[d];
  return memory.values.at(static_cast<size_t>(at));
}

void copy(const std::vector<Run>& all, const Memory& from, Memory& to) {
  for (const Run& run : all) {
    ASSERT_GT(run.numel, 0);
    for (int64_t i = 0; i < run.numel; ++i)
      to.values.at(static_cast<size_t>(run.to + i)) =
          from.values.at(static_cast<size_t>(run.from + i));
  }
}

TEST(StridedBox, RunsMoveWhatAnElementwiseCopyMoves) {
  Random random(61);
  int num_shared = 0;
  for (int round = 0; round < 20000; ++round) {
    const Indices shape = random_shape(random);
    Memory from = any_memory(random, random_box(random, shape));
    Memory to = any_memory(random, random_box(random, shape));
    int64_t next = 0;
    for_each_element(from.place.box, [&](const Indices& index) { element(from, index) = next++; });
    Memory expected = to;
    int64_t shared = 0;
    for_each_element(to.place.box, [&](const Indices& index) {
      if (!contains(from.place.box, index)) return;
      element(expected, index) = element(from, index);
      ++shared;
    });
    copy(runs(from.place, to.place), from, to);
    ASSERT_EQ(to.values, expected.values) << "round " << round << ", " << list_text(shape);
    EXPECT_EQ(intersect(from.place.box, to.place.box).numel(), shared);
    num_shared += shared > 1 ? 1 : 0;
  }
  EXPECT_GT(num_shared, 4000) << "the cases are too easy";
}

// Each run costs a copy, and in a file perhaps a read.
TEST(StridedBox, NoTwoRunsCouldBeOne) {
  Random random(62);
  int num_joined = 0;
  for (int round = 0; round < 20000; ++round) {
    const Indices shape = random_shape(random);
    const Memory from = random_memory(random, random_box(random, shape));
    const Memory to = random_memory(random, random_box(random, shape));
    const std::vector<fsdp::Run> all = runs(from.place, to.place);
    for (size_t i = 1; i < all.size(); ++i)
      ASSERT_FALSE(all[i - 1].from + all[i - 1].numel == all[i].from &&
                   all[i - 1].to + all[i - 1].numel == all[i].to)
          << "round " << round << ", " << list_text(shape);
    const Box shared = intersect(from.place.box, to.place.box);
    num_joined += shared.sizes.size() > 1 && all.size() == 1 && shared.sizes[0] > 1 ? 1 : 0;
  }
  EXPECT_GT(num_joined, 500) << "the cases are too easy";
}

// --- sections ------------------------------------------------------------------------------------

// All parts of a rank's range.
std::vector<SectionBox> parts_of(const std::vector<TensorSection>& sections,
                                 const std::vector<int64_t>& shape, FlatRange range) {
  std::vector<SectionBox> parts;
  for (const Box& box : boxes(shape, range))
    for (const SectionBox& part : cut_at_sections(sections, box)) parts.push_back(part);
  return parts;
}

// The drawing in tensor_boxes.h: from the last element of row 1 to the end of row 2.
TEST(TensorSections, CutAShardThatBeginsInMidRow) {
  const std::vector<TensorSection> halves = {{.name = "fc1_w", .shape = {2, 3}, .offsets = {0, 0}},
                                             {.name = "fc1_v", .shape = {2, 3}, .offsets = {2, 0}}};
  EXPECT_THAT(parts_of(halves, {4, 3}, {5, 9}),
              ElementsAre(SectionBox{0, Box{{1, 2}, {1, 1}}, Box{{1, 2}, {1, 1}}},
                          SectionBox{1, Box{{0, 0}, {1, 3}}, Box{{2, 0}, {1, 3}}}));
}

// --- fused tensors to sections and back, through random cuts -------------------------------------

size_t flat(const std::vector<int64_t>& index, const std::vector<int64_t>& shape) {
  int64_t at = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    EXPECT_TRUE(0 <= index[d] && index[d] < shape[d]) << list_text(index) << list_text(shape);
    at = at * shape[d] + index[d];
  }
  return static_cast<size_t>(at);
}

// The flat positions of a part, in the model tensor and in its section.
template <typename Visit>
void for_each_pair(const SectionBox& part, const std::vector<int64_t>& model_shape,
                   const std::vector<int64_t>& section_shape, const Visit& visit) {
  ASSERT_EQ(part.model.sizes, part.stored.sizes);
  for_each_element(part.model, [&](const std::vector<int64_t>& index) {
    std::vector<int64_t> stored = index;
    for (size_t d = 0; d < stored.size(); ++d)
      stored[d] += part.stored.offsets[d] - part.model.offsets[d];
    visit(flat(index, model_shape), flat(stored, section_shape));
  });
}

// A table of one to three rules that divide "w" along random dims, some of them again.
struct Case {
  std::vector<int64_t> shape;
  NameRules rules;
};

NameRule random_rule(Random& random, const std::string& pattern, int64_t dim, int64_t whole) {
  NameRule rule{.title = "", .pattern = pattern, .dim = dim, .sections = {}};
  const int64_t num_sections = draw(random, 2, 5);
  for (int64_t s = 0; s < num_sections; ++s) {
    const bool is_last = s + 1 == num_sections;
    const int64_t size = is_last ? whole : draw(random, 0, whole);
    rule.sections.push_back({concat("$0_", s), std::to_string(size)});
    whole -= size;
  }
  return rule;
}

Case random_case(Random& random) {
  Case result;
  const int64_t num_dims = draw(random, 1, 4);
  for (int64_t d = 0; d < num_dims; ++d) result.shape.push_back(draw(random, 1, 7));
  if (draw(random, 0, 19) == 0) result.shape[0] = 0;
  std::vector<NameRule> rules;
  std::string target = "w";
  std::vector<int64_t> shape = result.shape;
  for (int64_t r = draw(random, 1, 3); r > 0; --r) {
    const int64_t dim = draw(random, 0, num_dims - 1);
    rules.push_back(random_rule(random, target, dim, shape[static_cast<size_t>(dim)]));
    const auto chosen = static_cast<size_t>(draw(random, 0, 1));
    shape[static_cast<size_t>(dim)] = std::stoll(rules.back().sections[chosen].size);
    target += concat("_", chosen);
  }
  result.rules = NameRules(std::move(rules));
  return result;
}

// The range of each of up to eight ranks: cut anywhere, some of them empty.
std::vector<FlatRange> random_cuts(Random& random, int64_t numel) {
  std::vector<int64_t> cuts = {0, numel};
  for (int64_t ranks = draw(random, 1, 8); ranks > 1; --ranks)
    cuts.push_back(draw(random, 0, numel));
  std::sort(cuts.begin(), cuts.end());
  std::vector<FlatRange> ranges;
  for (size_t i = 1; i < cuts.size(); ++i) ranges.push_back({cuts[i - 1], cuts[i]});
  return ranges;
}

// Every rank writes its range of the fused tensor; an element that nobody writes is -1.
Store write(const Case& c, const Values& model, const std::vector<FlatRange>& ranks) {
  const std::vector<TensorSection> sections = c.rules.sections("w", c.shape);
  Store store;
  for (const TensorSection& section : sections) {
    const auto numel = static_cast<size_t>(testing::product(section.shape));
    EXPECT_TRUE(store.emplace(section.name, Values(numel, -1)).second) << section.name;
  }
  for (const FlatRange range : ranks) {
    for (const SectionBox& part : parts_of(sections, c.shape, range)) {
      const TensorSection& section = sections[part.section];
      for_each_pair(part, c.shape, section.shape, [&](size_t from, size_t to) {
        EXPECT_TRUE(range.begin <= static_cast<int64_t>(from) &&
                    static_cast<int64_t>(from) < range.end);
        EXPECT_EQ(store[section.name][to], -1) << "written twice";
        store[section.name][to] = model[from];
      });
    }
  }
  return store;
}

Values read(const Case& c, const Store& store, const std::vector<FlatRange>& ranks) {
  const std::vector<TensorSection> sections = c.rules.sections("w", c.shape);
  Values model(static_cast<size_t>(testing::product(c.shape)), -1);
  for (const FlatRange range : ranks)
    for (const SectionBox& part : parts_of(sections, c.shape, range))
      for_each_pair(part, c.shape, sections[part.section].shape, [&](size_t to, size_t from) {
        model[to] = store.at(sections[part.section].name)[from];
      });
  return model;
}

TEST(SectionRoundTrip, IsTheIdentityFromAnyCutToAnyOther) {
  Random random(20);
  for (int round = 0; round < 2000; ++round) {
    const Case c = random_case(random);
    const int64_t numel = testing::product(c.shape);
    Values model(static_cast<size_t>(numel));
    std::iota(model.begin(), model.end(), draw(random, 0, 1'000'000));
    const Store store = write(c, model, random_cuts(random, numel));
    ASSERT_EQ(read(c, store, random_cuts(random, numel)), model) << list_text(c.shape);
    if (HasFailure()) FAIL() << "round " << round << ", shape " << list_text(c.shape);
  }
}

}  // namespace
}  // namespace fsdp::tensor_boxes_test
