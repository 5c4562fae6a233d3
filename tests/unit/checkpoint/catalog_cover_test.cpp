// Parts cover a tensor exactly if every element occurs once, as counting them one by one shows.
#include <gtest/gtest.h>

#include <random>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "support/stored_checkpoint.h"
#include "support/temp_dir.h"

namespace fsdp::catalog_cover_test {
namespace {

using Random = std::mt19937_64;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Parts that are a tensor, and then often one of them lost, doubled, moved or cut.
std::vector<Box> random_parts(Random& random) {
  std::vector<int64_t> shape(static_cast<size_t>(draw(random, 0, 3)));
  for (int64_t& size : shape) size = draw(random, 1, 5);
  std::vector<Box> parts =
      testing::random_boxes(random, shape, static_cast<int>(draw(random, 0, 7)));
  const auto chosen = static_cast<size_t>(draw(random, 0, static_cast<int64_t>(parts.size()) - 1));
  Box& part = parts[chosen];
  const auto dim = static_cast<size_t>(draw(random, 0, 2));
  switch (draw(random, 0, 5)) {
    case 0:
      if (parts.size() > 1) parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(chosen));
      break;
    case 1:
      parts.push_back(Box(part));
      break;
    case 2:
      if (dim < shape.size()) part.offsets[dim] += draw(random, 0, 1);
      break;
    case 3:
      if (dim < shape.size() && part.sizes[dim] > 0) part.sizes[dim] -= 1;
      break;
    default:
      break;  // as it is
  }
  return parts;
}

// Without a manifest the shape is as far as parts reach.
std::vector<int64_t> reach(const std::vector<Box>& parts) {
  std::vector<int64_t> shape(parts.front().sizes.size(), 0);
  for (const Box& part : parts)
    for (size_t d = 0; d < shape.size(); ++d)
      shape[d] = std::max(shape[d], part.offsets[d] + part.sizes[d]);
  return shape;
}

bool is_exact(const std::vector<Box>& parts) {
  const std::vector<int64_t> shape = reach(parts);
  std::vector<int> counts(static_cast<size_t>(testing::whole_box(shape).numel()), 0);
  const std::vector<int64_t> strides = strides_of(shape);
  for (const Box& part : parts) {
    StridedBox place{part, strides, 0};
    for (size_t d = 0; d < shape.size(); ++d) place.begin += part.offsets[d] * strides[d];
    for (const fsdp::Run& run : runs(place, packed(part, 0)))
      for (int64_t i = 0; i < run.numel; ++i) ++counts[static_cast<size_t>(run.from + i)];
  }
  return std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; });
}

TEST(CatalogCover, IsWhatCountingElementsSays) {
  Random random(90);
  int num_exact = 0;
  constexpr int kRounds = 800;
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<Box> parts = random_parts(random);
    const testing::TempDir directory(testing::TempDir::On::kMemory);
    std::vector<Piece> pieces;
    for (const Box& part : parts)
      pieces.push_back({.name = "w",
                        .dtype = DType::kUInt8,
                        .box = part,
                        .read = [](FlatRange range, std::byte* into) {
                          std::fill_n(into, range.numel(), std::byte{1});
                        }});
    write_pieces(directory.path(), 0, {{"model", pieces}}, {});
    bool is_accepted = true;
    try {
      EXPECT_EQ(TensorCatalog(directory / "model").model().at("w").tensor.shape, reach(parts));
    } catch (const Error&) {
      is_accepted = false;
    }
    std::string text;
    for (const Box& part : parts)
      text += concat(list_text(part.offsets), " of ", list_text(part.sizes), "; ");
    ASSERT_EQ(is_accepted, is_exact(parts)) << "round " << round << ": " << text;
    num_exact += is_accepted ? 1 : 0;
  }
  EXPECT_GT(num_exact, kRounds / 5);
  EXPECT_LT(num_exact, kRounds * 4 / 5);
}

}  // namespace
}  // namespace fsdp::catalog_cover_test
