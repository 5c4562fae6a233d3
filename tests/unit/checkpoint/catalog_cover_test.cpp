// Parts cover a tensor exactly if every element occurs once, as counting them one by one shows.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <map>
#include <random>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
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
    write_pieces(directory.path(), "model", 0, pieces, {});
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

// Numbers of a good file's header, each replaced by what could overflow.
std::string with_another_number(Random& random, const std::string& text) {
  static const std::array<std::string, 9> kNumbers = {"0",
                                                      "1",
                                                      "2",
                                                      "8",
                                                      "4294967296",
                                                      "3037000500",
                                                      "4611686018427387903",
                                                      "4611686018427387904",
                                                      "9223372036854775807"};
  std::vector<std::pair<size_t, size_t>> places;
  for (size_t i = 0; i < text.size();) {
    const size_t begin = text.find_first_of("0123456789", i);
    if (begin == std::string::npos) break;
    i = std::min(text.find_first_not_of("0123456789", begin), text.size());
    places.emplace_back(begin, i);
  }
  const auto [begin, end] =
      places[static_cast<size_t>(draw(random, 0, static_cast<int64_t>(places.size()) - 1))];
  return text.substr(0, begin) + kNumbers[static_cast<size_t>(draw(random, 0, 8))] +
         text.substr(end);
}

// Run with the undefined-behaviour sanitizer this is about overflow; without it about consistency.
TEST(CatalogCover, NumbersOfAStrangersFileAreRefusedOrConsistent) {
  const std::string good =
      R"({"v":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},)"
      R"("w":{"dtype":"F32","shape":[1,1,0],"data_offsets":[4,4]},)"
      R"("__metadata__":{"DCP_SHARDING_INFO":)"
      R"("{\"v\":{\"saved_offsets\":[0,0]},\"w\":{\"saved_offsets\":[0,0,0]}}"}})";
  Random random(91);
  const testing::TempDir directory(testing::TempDir::On::kMemory);
  int num_accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string header = good;
    for (int64_t i = draw(random, 1, 4); i > 0; --i) header = with_another_number(random, header);
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i) & 0xFF));
    bytes += header;
    bytes.append(static_cast<size_t>(4 * draw(random, 0, 2)), 'x');
    write_file_durably(directory / "a.safetensors", bytes);
    try {
      const TensorCatalog catalog(directory.path());
      ++num_accepted;
      for (const auto& [name, tensor] : catalog.model()) {
        int64_t numel = 0;
        for (const StoredBox& box : tensor.boxes) numel += box.place.box.numel();
        ASSERT_EQ(numel, testing::whole_box(tensor.tensor.shape).numel()) << header;
      }
    } catch (const Error& error) {
      ASSERT_NE(std::string_view(error.what()).find(directory.path()), std::string_view::npos)
          << error.what() << "\n"
          << header;
    }
  }
  EXPECT_GT(num_accepted, 20);
}

}  // namespace
}  // namespace fsdp::catalog_cover_test
