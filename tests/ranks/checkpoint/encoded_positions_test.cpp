// Positions of patches come back from their encoding, which is the shortest that the format has; on
// a device as on the host.
#include "fsdp/checkpoint/patches/changed_weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "support/test_device.h"

namespace fsdp::testing::encoded_positions_test {
namespace {

// Positions as a reader of files gets them.
at::Tensor decoded(const EncodedPositions& stored, int64_t count) {
  if (stored.form == PositionForm::kRanges) {
    std::vector<at::Tensor> parts;
    for (int64_t i = 0; i < stored.numbers.size(0); ++i)
      parts.push_back(
          at::arange(stored.numbers[i][0].item<int64_t>(), stored.numbers[i][1].item<int64_t>()));
    return at::cat(parts);
  }
  const std::span bytes(static_cast<const std::byte*>(stored.numbers.const_data_ptr()),
                        stored.numbers.nbytes());
  const int64_t width = stored.form == PositionForm::kSkips ? 1 : 2;
  return at::tensor(decode_skips(bytes, width, count, int64_t{1} << 41, "x"), at::kLong);
}

EncodedPositions encoded_there(const at::Tensor& positions) {
  return encoded(positions.to(test_device()));
}

at::Tensor drawn_positions(int64_t numel, double density, uint64_t seed) {
  at::manual_seed(seed);
  return at::rand({numel}).lt(density).nonzero().view({-1});
}

TEST(EncodedPositions, ComeBack) {
  const auto list = [](std::vector<int64_t> positions) { return at::tensor(positions, at::kLong); };
  for (const at::Tensor& positions :
       {list({0}), list({254}), list({255}), list({256, 511, 512, 768}), list({65534}),
        list({65535}), list({65536}), list({65535, 65536 + 65534, 500'000}),
        list({0, 10'000'000'000}), drawn_positions(100'000, 0.5, 1),
        drawn_positions(100'000, 0.01, 2), drawn_positions(1'000'000, 0.0001, 3),
        at::arange(7, 4000)})
    EXPECT_TRUE(at::equal(decoded(encoded_there(positions), positions.numel()), positions))
        << positions.numel() << " positions up to " << positions[-1].item<int64_t>();
}

// Encoded positions decide the size of a patch: about a byte per element where one in a hundred has
// changed.
TEST(EncodedPositions, TakeFewBytes) {
  const auto bytes_each = [](double density) {
    const at::Tensor positions = drawn_positions(2'000'000, density, 4);
    return static_cast<double>(encoded_there(positions).numbers.nbytes()) /
           static_cast<double>(positions.numel());
  };
  EXPECT_EQ(bytes_each(0.5), 1.0);
  EXPECT_LT(bytes_each(0.01), 1.1);
  EXPECT_LT(bytes_each(0.001), 2.01);
}

TEST(EncodedPositions, AreRangesWhereThoseAreShorter) {
  const at::Tensor two = at::cat({at::arange(4, 40), at::arange(41, 50)});  // skips: 45 bytes
  const EncodedPositions ranges = encoded_there(two);
  EXPECT_EQ(ranges.form, PositionForm::kRanges);
  EXPECT_TRUE(at::equal(ranges.numbers, at::tensor({4, 40, 41, 50}, at::kLong).view({2, 2})));
  EXPECT_EQ(encoded_there(two.narrow(0, 20, 20)).form, PositionForm::kSkips);
  EXPECT_EQ(encoded_there(at::arange(0, 16)).form, PositionForm::kRanges);
  EXPECT_EQ(encoded_there(at::arange(0, 15)).form, PositionForm::kSkips);
  EXPECT_EQ(encoded_there(at::arange(0, 100) * 1000).form, PositionForm::kWideSkips);
}

}  // namespace
}  // namespace fsdp::testing::encoded_positions_test
