// Runs between two memories that hold boxes of one tensor: what an element-by-element copy does.
#include "fsdp/checkpoint/format/tensor_boxes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "fsdp/base/text.h"

namespace fsdp::strided_box_test {
namespace {

using Random = std::mt19937_64;
using Indices = std::vector<int64_t>;

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

TEST(StridedBox, ATensorWithoutDimsIsOneRun) {
  EXPECT_EQ(runs(packed({}, 7), packed({}, 3)), (std::vector<fsdp::Run>{{7, 3, 1}}));
}

TEST(StridedBox, PartOfABoxKeepsItsPlaceInMemory) {
  const StridedBox whole = packed({{2, 4}, {3, 5}}, 10);
  const StridedBox part = part_of(whole, {{3, 5}, {9, 2}});
  EXPECT_EQ(part.box, (Box{{3, 5}, {2, 2}}));
  EXPECT_EQ(part.strides, whole.strides);
  EXPECT_EQ(part.begin, 10 + 5 + 1);
}

// A shape without elements may have any other sizes: files of others do.
TEST(StridedBox, SizesBesideAZeroDoNotOverflow) {
  const int64_t huge = int64_t{1} << 62;
  for (const Indices& shape : {Indices{huge, 4, 0}, Indices{0, huge, 4}, Indices{huge, 0, huge}}) {
    const Box box{Indices(3, 0), shape};
    EXPECT_EQ(box.numel(), 0) << list_text(shape);
    EXPECT_TRUE(runs(packed(box, 0), packed(box, 0)).empty()) << list_text(shape);
  }
}

}  // namespace
}  // namespace fsdp::strided_box_test
