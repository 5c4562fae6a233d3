// From random writers to random readers: the same bytes, and no more of them than needed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "support/stored_checkpoint.h"
#include "support/temp_dir.h"

namespace fsdp::tensor_stream_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Random = std::mt19937_64;
using testing::TensorData;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

template <typename Range>
auto& pick(Random& random, Range&& from) {
  return from[static_cast<size_t>(draw(random, 0, static_cast<int64_t>(from.size()) - 1))];
}

std::vector<TensorData> random_tensors(Random& random, const std::string& suffix) {
  std::vector<TensorData> tensors;
  for (int64_t i = draw(random, 1, 6); i > 0; --i) {
    std::vector<int64_t> shape(static_cast<size_t>(draw(random, 0, 3)));
    for (int64_t& size : shape) size = draw(random, 0, 11) == 0 ? 0 : draw(random, 1, 9);
    tensors.push_back(testing::random_data(random, concat("layer.", i, ".weight", suffix),
                                           pick(random, all_dtypes()), std::move(shape)));
  }
  return tensors;
}

// Boxes of all tensors, given to ranks at random.
void distribute(Random& random, const std::vector<TensorData>& tensors,
                std::vector<testing::RankPieces>& ranks,
                std::vector<Piece> testing::RankPieces::*kind) {
  for (const TensorData& data : tensors)
    for (const Box& box :
         testing::random_boxes(random, data.tensor.shape, static_cast<int>(draw(random, 0, 6))))
      (pick(random, ranks).*kind).push_back(testing::piece_of(data, box));
}

WriteOptions random_write_options(Random& random) {
  return {.chunk_bytes = 8 * draw(random, 1, 40), .block_bytes = draw(random, 1, 150)};
}

// A box of a tensor, in an array that is larger than the box in some dims.
struct Target {
  const TensorData* data = nullptr;
  StridedBox place;
  std::vector<std::byte> bytes;
  std::vector<std::byte> expected;
};

Target random_target(Random& random, const TensorData& data) {
  Target target{&data, {}, {}, {}};
  std::vector<int64_t> around;
  for (const int64_t size : data.tensor.shape) {
    target.place.box.offsets.push_back(draw(random, 0, 1) == 0 ? 0 : draw(random, 0, size));
    const int64_t left = size - target.place.box.offsets.back();
    target.place.box.sizes.push_back(draw(random, 0, 1) == 0 ? left : draw(random, 0, left));
    around.push_back(target.place.box.sizes.back() + draw(random, 0, 1) * draw(random, 0, 3));
  }
  target.place.strides = strides_of(around);
  target.place.begin = draw(random, 0, 5);
  const int64_t width = element_bytes(data.tensor.dtype);
  const int64_t numel = testing::whole_box(around).numel() + target.place.begin;
  target.bytes.resize(static_cast<size_t>(numel * width), std::byte{0xA5});
  target.expected = target.bytes;
  for (const Run& run : runs(packed(testing::whole_box(data.tensor.shape), 0), target.place))
    std::copy_n(data.bytes.begin() + run.from * width, run.numel * width,
                target.expected.begin() + run.to * width);
  return target;
}

void add_target(const TensorSet& set, Target& target, std::vector<FileRun>& wanted) {
  const CatalogTensor& stored = set.at(target.data->tensor.name);
  EXPECT_EQ(stored.tensor, target.data->tensor);
  add_runs(stored, target.place, target.bytes.data(), wanted);
}

// Counts by hand: blocks that hold something of a run, each once.
int64_t bytes_of_blocks(std::span<const CheckedFile> files, std::span<const FileRun> wanted) {
  std::set<std::pair<size_t, int64_t>> blocks;
  for (const FileRun& run : wanted) {
    const int64_t block = std::max<int64_t>(files[run.file].block_bytes, 1);
    for (int64_t i = run.offset / block; i * block < run.offset + run.bytes; ++i)
      blocks.emplace(run.file, i);
  }
  int64_t bytes = 0;
  for (const auto& [file, index] : blocks) {
    const int64_t block = std::max<int64_t>(files[file].block_bytes, 1);
    bytes += std::min(block, files[file].bytes - index * block);
  }
  return bytes;
}

TEST(CheckpointReads, AreWhatWasWrittenFromAnyCutToAnyOther) {
  Random random(66);
  for (int round = 0; round < 150; ++round) {
    const testing::TempDir directory(testing::TempDir::On::kMemory);
    const std::vector<TensorData> model = random_tensors(random, "");
    const std::vector<TensorData> moments = random_tensors(random, ".exp_avg");
    std::vector<testing::RankPieces> ranks(static_cast<size_t>(draw(random, 1, 5)));
    distribute(random, model, ranks, &testing::RankPieces::model);
    distribute(random, moments, ranks, &testing::RankPieces::moments);
    testing::write_checkpoint(directory.path(), testing::manifest_of(model, moments), ranks,
                              random_write_options(random));

    const TensorCatalog catalog(directory.path());
    std::vector<Target> targets;
    for (int i = 0; i < 8; ++i) {
      targets.push_back(random_target(random, pick(random, model)));
      targets.push_back(random_target(random, pick(random, moments)));
    }
    std::vector<FileRun> wanted;
    for (size_t i = 0; i < targets.size(); ++i)
      add_target(i % 2 == 0 ? catalog.model() : catalog.moments(), targets[i], wanted);
    const ReadStatistics statistics =
        read_runs(catalog.files(), wanted,
                  {.chunk_bytes = draw(random, 1, 400), .threads = static_cast<int>(round % 3)});
    for (const Target& target : targets)
      ASSERT_EQ(target.bytes, target.expected)
          << "round " << round << ", " << list_text(target.data->tensor.shape);
    // Whole blocks, and none twice, however many runs want something of it.
    ASSERT_EQ(statistics.bytes, bytes_of_blocks(catalog.files(), wanted)) << "round " << round;
  }
}

// One file with one tensor of `rows` x `columns` fp32.
struct OneTensor {
  OneTensor(int64_t rows, int64_t columns, const WriteOptions& options)
      : data(testing::random_data(random, "w", DType::kFloat32, {rows, columns})) {
    const testing::RankPieces piece{
        {testing::piece_of(data, testing::whole_box(data.tensor.shape))}, {}};
    testing::write_checkpoint(directory.path(), testing::manifest_of({&data, 1}), {&piece, 1},
                              options);
  }

  ReadStatistics read(const Box& box, const ReadOptions& options) {
    const TensorCatalog catalog(directory.path());
    std::vector<std::byte> into(static_cast<size_t>(box.numel() * 4));
    std::vector<FileRun> wanted;
    add_runs(catalog.model().at("w"), packed(box, 0), into.data(), wanted);
    const ReadStatistics statistics = read_runs(catalog.files(), std::move(wanted), options);
    for (const fsdp::Run& run :
         runs(packed(testing::whole_box(data.tensor.shape), 0), packed(box, 0)))
      EXPECT_TRUE(std::equal(into.begin() + run.to * 4, into.begin() + (run.to + run.numel) * 4,
                             data.bytes.begin() + run.from * 4));
    return statistics;
  }

  testing::TempDir directory{testing::TempDir::On::kMemory};
  Random random{68};
  TensorData data;
};

// The bytes are those of the blocks, as above; here is how many reads they take.
TEST(CheckpointReads, ShareReadsOfNeighbouringBlocks) {
  constexpr int64_t kBlock = 256;
  OneTensor one(256, 64, {.chunk_bytes = 4096, .block_bytes = kBlock});  // a row is a block long
  EXPECT_EQ(one.read({{7, 0}, {33, 64}}, {.threads = 1}).num_reads, 1);
  EXPECT_EQ(one.read({{0, 5}, {32, 2}}, {}).num_reads, 1);
  EXPECT_EQ(one.read({{1, 2}, {0, 2}}, {}).num_reads, 0);
  // A chunk is 1024 bytes, whole blocks; 64 KiB of data need 64 of them, and its ends one more.
  const int64_t num_reads = one.read({{0, 0}, {256, 64}}, {.chunk_bytes = 1000}).num_reads;
  EXPECT_TRUE(num_reads == 64 || num_reads == 65) << num_reads;
  OneTensor wide(32, 1024, {.chunk_bytes = 4096, .block_bytes = kBlock});
  EXPECT_EQ(wide.read({{0, 500}, {32, 3}}, {}).num_reads, 32) << "far apart";
}

TEST(CheckpointReads, OptionsThatCannotWorkAreRefused) {
  OneTensor one(4, 4, {.chunk_bytes = 64, .block_bytes = 64});
  for (const int64_t bytes : {int64_t{0}, int64_t{-1}})
    EXPECT_THAT(
        [&] {
          one.read({{0, 0}, {4, 4}}, {.chunk_bytes = bytes});
        },
        ThrowsMessage<UsageError>(HasSubstr(concat("chunk_bytes is ", bytes))));
  const auto write = [&](const WriteOptions& options) {
    const Piece piece = testing::piece_of(one.data, testing::whole_box({4, 4}));
    write_pieces(one.directory / "other", 0, {{"model", std::span(&piece, 1)}}, options);
  };
  EXPECT_THAT([&] { write({.chunk_bytes = 0}); },
              ThrowsMessage<UsageError>(HasSubstr("chunk_bytes is 0")));
  EXPECT_THAT([&] { write({.block_bytes = 0}); },
              ThrowsMessage<UsageError>(HasSubstr("block_bytes is 0")));
  EXPECT_THAT([&] { write({.block_bytes = kMaxBlockBytes + 1}); },
              ThrowsMessage<UsageError>(HasSubstr("block_bytes is ")));
}

// Readers convert in place, so elements must be where their type may be.
TEST(PieceWriter, AsksForElementsAtAlignedPlaces) {
  const testing::TempDir directory(testing::TempDir::On::kMemory);
  for (const int64_t chunk_bytes : {1, 7, 9, 12, 100}) {
    std::vector<Piece> pieces;
    for (const DType dtype : all_dtypes())
      pieces.push_back({.name = std::string(name_of(dtype)),
                        .dtype = dtype,
                        .box = {{0}, {13}},
                        .read = [dtype](FlatRange range, std::byte* into) {
                          const int64_t width = element_bytes(dtype);
                          EXPECT_GT(range.numel(), 0);
                          EXPECT_EQ(reinterpret_cast<uintptr_t>(into) % static_cast<size_t>(width),
                                    0u);
                          std::fill_n(into, range.numel() * width, std::byte{0});
                        }});
    const auto files =
        write_pieces(directory.path(), 0, {{"model", pieces}}, {.chunk_bytes = chunk_bytes});
    ASSERT_EQ(files.size(), 1u);
  }
}

TEST(PieceWriter, PutsFurtherBoxesOfATensorIntoFurtherFiles) {
  const testing::TempDir directory(testing::TempDir::On::kMemory);
  Random random(69);
  const TensorData a = testing::random_data(random, "a", DType::kFloat32, {6});
  const TensorData b = testing::random_data(random, "b", DType::kUInt8, {2});
  const std::vector<Piece> pieces = {
      testing::piece_of(a, {{0}, {2}}), testing::piece_of(a, {{2}, {1}}),
      testing::piece_of(b, {{0}, {2}}), testing::piece_of(a, {{3}, {3}})};
  std::vector<std::string> paths;
  for (const RankRecord::File& file : write_pieces(directory.path(), 12, {{"model", pieces}}, {}))
    paths.push_back(file.path);
  EXPECT_EQ(paths,
            (std::vector<std::string>{"model/00012-0.safetensors", "model/00012-1.safetensors",
                                      "model/00012-2.safetensors"}));
  EXPECT_EQ(TensorCatalog(directory / "model").model().at("a").boxes.size(), 3u);
}

// --- tensor values -------------------------------------------------------------------------------

// Numbers of every type, and conversions that round once.

constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename Value>
std::span<const std::byte> bytes(const std::vector<Value>& values) {
  return std::as_bytes(std::span(values));
}

template <typename Value>
std::vector<double> values_of(DType dtype, const std::vector<Value>& codes) {
  std::vector<double> values(codes.size());
  read_values(dtype, bytes(codes), values);
  return values;
}

// The codes that a number becomes.
template <typename From>
uint16_t narrow(DType from, From value, DType to) {
  const std::vector<From> values = {value};
  std::vector<uint16_t> code(1);
  convert_values(from, bytes(values), to, std::as_writable_bytes(std::span(code)));
  return code[0];
}
uint16_t bf16_of_double(double value) { return narrow(DType::kFloat64, value, DType::kBFloat16); }

TEST(TensorValues, ReadsEveryType) {
  EXPECT_EQ(values_of(DType::kFloat64, std::vector<double>{1e300, -2}),
            (std::vector<double>{1e300, -2}));
  EXPECT_EQ(values_of(DType::kFloat32, std::vector<float>{0.5f}), std::vector<double>{0.5});
  EXPECT_EQ(values_of(DType::kFloat16, std::vector<uint16_t>{0x3C00, 0xC000, 0x0001}),
            (std::vector<double>{1, -2, 0x1p-24}));
  EXPECT_EQ(values_of(DType::kBFloat16, std::vector<uint16_t>{0x3F80, 0xFF80}),
            (std::vector<double>{1, -kInf}));
  EXPECT_EQ(values_of(DType::kFloat8E4M3, std::vector<uint8_t>{0x38}), std::vector<double>{1});
  EXPECT_EQ(values_of(DType::kFloat8E5M2, std::vector<uint8_t>{0x3C}), std::vector<double>{1});
  EXPECT_EQ(values_of(DType::kInt64, std::vector<int64_t>{-7}), std::vector<double>{-7});
  EXPECT_EQ(values_of(DType::kInt32, std::vector<int32_t>{9}), std::vector<double>{9});
  EXPECT_EQ(values_of(DType::kUInt8, std::vector<uint8_t>{200}), std::vector<double>{200});
}

// In fp32 these are ties, and would go to the other neighbour.
TEST(TensorValues, RoundsDoublesOnce) {
  EXPECT_EQ(bf16_of_double(1.0 + 0x1p-8), 0x3F80);
  EXPECT_EQ(bf16_of_double(1.0 + 0x1p-8 + 0x1p-40), 0x3F81);
  EXPECT_EQ(bf16_of_double(1.0 + 0x1p-7 + 0x1p-8 - 0x1p-40), 0x3F81);
  EXPECT_EQ(bf16_of_double(-(1.0 + 0x1p-8 + 0x1p-40)), 0xBF81);
  EXPECT_EQ(narrow(DType::kFloat64, 1.0 + 0x1p-11 + 0x1p-50, DType::kFloat16), 0x3C01);
  EXPECT_EQ(bf16_of_double(kInf), 0x7F80);
  EXPECT_EQ(bf16_of_double(0x1.FEp127), 0x7F7F);
  EXPECT_EQ(bf16_of_double(1e300), 0x7F80);
  EXPECT_TRUE(
      std::isnan(values_of(DType::kBFloat16, std::vector<uint16_t>{bf16_of_double(NAN)})[0]));
}

TEST(TensorValues, CountsFiniteNumbersThatDoNotFit) {
  const std::vector<float> values = {65504, 65519, 65520, -1e6f, INFINITY, NAN};
  std::vector<uint16_t> codes(values.size());
  const auto into = std::as_writable_bytes(std::span(codes));
  EXPECT_EQ(convert_values(DType::kFloat32, bytes(values), DType::kFloat16, into), 2);
  EXPECT_EQ(codes[1], 0x7BFF);
  EXPECT_EQ(codes[2], 0x7C00);
  EXPECT_EQ(convert_values(DType::kFloat32, bytes(values), DType::kBFloat16, into), 0);
  const std::vector<float> largest = {0x1.FEFFFEp127f, 0x1.FFp127f};
  EXPECT_EQ(convert_values(DType::kFloat32, bytes(largest), DType::kBFloat16, into.first(4)), 1);
  EXPECT_EQ(codes[0], 0x7F7F);
  const std::vector<double> wide = {0x1.FFFFFEp127, 0x1.FFFFFF0001p127, 1e39};
  std::vector<float> narrow_values(3);
  EXPECT_EQ(convert_values(DType::kFloat64, bytes(wide), DType::kFloat32,
                           std::as_writable_bytes(std::span(narrow_values))),
            2);
}

}  // namespace
}  // namespace fsdp::tensor_stream_test
