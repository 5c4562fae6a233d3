// Fused tensors to sections and back, through random cuts, without a change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "support/layout_checker.h"

namespace fsdp::section_round_trip_test {
namespace {

using Random = std::mt19937_64;
using Values = std::vector<int64_t>;
// Stored sections by name, as a checkpoint holds them.
using Store = std::map<std::string, Values>;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Calls visit(index) for every element of a box.
template <typename Visit>
void for_each_element(const Box& box, const Visit& visit) {
  std::vector<int64_t> index = box.offsets;
  for (int64_t i = 0; i < box.numel(); ++i) {
    visit(index);
    for (size_t d = index.size(); d-- > 0;) {
      if (++index[d] < box.offsets[d] + box.sizes[d]) break;
      index[d] = box.offsets[d];
    }
  }
}

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

// All parts of a rank's range.
std::vector<SectionBox> parts_of(const std::vector<TensorSection>& sections,
                                 const std::vector<int64_t>& shape, FlatRange range) {
  std::vector<SectionBox> parts;
  for (const Box& box : boxes(shape, range))
    for (const SectionBox& part : cut_at_sections(sections, box)) parts.push_back(part);
  return parts;
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

// The other direction: sections that were written by a model that keeps them apart.
TEST(SectionRoundTrip, KeepsTensorsThatWereNeverFused) {
  Random random(21);
  for (int round = 0; round < 2000; ++round) {
    const Case c = random_case(random);
    const int64_t numel = testing::product(c.shape);
    Store apart;
    int64_t next = draw(random, 0, 1'000'000);
    for (const TensorSection& section : c.rules.sections("w", c.shape)) {
      Values& values = apart[section.name];
      values.resize(static_cast<size_t>(testing::product(section.shape)));
      std::iota(values.begin(), values.end(), next);
      next += static_cast<int64_t>(values.size());
    }
    const Values fused = read(c, apart, random_cuts(random, numel));
    ASSERT_EQ(write(c, fused, random_cuts(random, numel)), apart) << list_text(c.shape);
    if (HasFailure()) FAIL() << "round " << round << ", shape " << list_text(c.shape);
  }
}

// Boxes of any kind, not only those of flat ranges.
TEST(SectionRoundTrip, TilesEveryBoxExactly) {
  Random random(22);
  int num_straddling = 0;
  for (int round = 0; round < 5000; ++round) {
    const Case c = random_case(random);
    const std::vector<TensorSection> sections = c.rules.sections("w", c.shape);
    Box box;
    for (const int64_t size : c.shape) {
      // Mostly large: small boxes seldom straddle anything.
      box.offsets.push_back(draw(random, 0, std::min(size, draw(random, 0, size))));
      const int64_t left = size - box.offsets.back();
      box.sizes.push_back(std::max(draw(random, 0, left), draw(random, 0, left)));
    }
    std::vector<size_t> expected;
    for_each_element(box, [&](const auto& index) { expected.push_back(flat(index, c.shape)); });
    std::vector<size_t> found;
    const std::vector<SectionBox> parts = cut_at_sections(sections, box);
    for (size_t p = 0; p < parts.size(); ++p) {
      ASSERT_TRUE(p == 0 || parts[p - 1].section < parts[p].section);
      ASSERT_GT(parts[p].model.numel(), 0);
      for_each_pair(parts[p], c.shape, sections[parts[p].section].shape,
                    [&](size_t model, size_t) { found.push_back(model); });
    }
    std::sort(found.begin(), found.end());
    ASSERT_EQ(found, expected) << list_text(c.shape);
    num_straddling += parts.size() > 1 ? 1 : 0;
  }
  EXPECT_GT(num_straddling, 1000) << "the cases are too easy";
}

}  // namespace
}  // namespace fsdp::section_round_trip_test
