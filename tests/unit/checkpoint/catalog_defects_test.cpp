// Every way a checkpoint can be broken: one test, one sentence that names the file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/safetensors_header.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/verified_reads.h"
#include "support/stored_checkpoint.h"
#include "support/temp_dir.h"

namespace fsdp::catalog_defects_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TensorData;
using ::testing::ThrowsMessage;

constexpr int64_t kBlock = 64;
constexpr const char* kFirst = "model/00000-0.safetensors";
constexpr const char* kSecond = "model/00001-0.safetensors";

// Two ranks with a half each of "w" [8, 16], and of its moment.
class CatalogDefects : public ::testing::Test {
 protected:
  CatalogDefects() { stored_ = write({{{0, 0}, {4, 16}}}, {{{4, 0}, {4, 16}}}); }

  // The boxes of "w" that each rank writes.
  testing::StoredCheckpoint write(const std::vector<Box>& first, const std::vector<Box>& second) {
    fs::remove_all(path());
    std::vector<testing::RankPieces> ranks(2);
    for (const Box& box : first) ranks[0].model.push_back(testing::piece_of(weight_, box));
    for (const Box& box : second) ranks[1].model.push_back(testing::piece_of(weight_, box));
    ranks[0].moments = {testing::piece_of(moment_, {{0, 0}, {4, 16}})};
    ranks[1].moments = {testing::piece_of(moment_, {{4, 0}, {4, 16}})};
    return testing::write_checkpoint(path(), testing::manifest_of({&weight_, 1}, {&moment_, 1}),
                                     ranks, {.chunk_bytes = 128, .block_bytes = kBlock});
  }

  std::string path() const { return directory_ / "step-00000001"; }
  std::string path(const std::string& file) const { return concat(path(), "/", file); }

  template <typename Matcher>
  void expect_refusal(const Matcher& words) const {
    EXPECT_THAT([&] { TensorCatalog catalog(path()); },
                ThrowsMessage<Error>(AllOf(HasSubstr(directory_.path()), words)));
  }

  void flip(const std::string& file, int64_t byte) const {
    std::fstream stream(path(file), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(byte);
    const char old = static_cast<char>(stream.get());
    stream.seekp(byte);
    stream.put(static_cast<char>(old ^ 4));
    ASSERT_TRUE(stream.good());
  }

  // Rewrites a file of one tensor with the test's own header and right checksums, so that only the
  // header is wrong.
  void replace(const std::string& file, size_t rank, SafetensorsHeader header) {
    std::string bytes = write_safetensors_header(header);
    const auto header_bytes = static_cast<int64_t>(bytes.size());
    for (const SafetensorsEntry& entry : header.tensors)
      bytes.append(static_cast<size_t>(entry.end - entry.begin), 'x');
    write_file_durably(path(file), bytes);
    RankRecord::File record = checked(file, bytes, header_bytes);
    for (RankRecord::File& each : stored_.records[rank].files)
      if (each.path == file) each = record;
    stored_.list({file, record.bytes, crc32c(std::as_bytes(std::span(bytes)))});
    stored_.write_record(static_cast<int64_t>(rank));
    stored_.write_manifest();
  }

  static RankRecord::File checked(const std::string& file, std::string_view bytes,
                                  int64_t header_bytes) {
    const auto crc_of = [&](size_t begin, size_t length) {
      return crc32c(std::as_bytes(std::span(bytes.substr(begin, length))));
    };
    RankRecord::File record{.path = file,
                            .bytes = static_cast<int64_t>(bytes.size()),
                            .header_bytes = header_bytes,
                            .header_crc32c = crc_of(0, static_cast<size_t>(header_bytes)),
                            .blocks = {}};
    for (size_t begin = 0; begin < bytes.size(); begin += kBlock)
      record.blocks.push_back(crc_of(begin, kBlock));
    return record;
  }

  static SafetensorsHeader header_of(const std::string& sharding_info,
                                     std::vector<int64_t> shape = {4, 16},
                                     DType dtype = DType::kFloat32) {
    SafetensorsHeader header;
    header.tensors = {{.name = "w", .dtype = dtype, .shape = std::move(shape)}};
    if (!sharding_info.empty()) header.metadata["DCP_SHARDING_INFO"] = sharding_info;
    return header;
  }

  testing::TempDir directory_{testing::TempDir::On::kMemory};
  std::mt19937_64 random_{70};
  TensorData weight_ = testing::random_data(random_, "w", DType::kFloat32, {8, 16});
  TensorData moment_ = testing::random_data(random_, "w.exp_avg", DType::kFloat32, {8, 16});
  testing::StoredCheckpoint stored_;
};

TEST_F(CatalogDefects, NoneIsFoundInAGoodOne) {
  const TensorCatalog catalog(path());
  EXPECT_EQ(catalog.model().at("w").boxes.size(), 2u);
  EXPECT_EQ(catalog.moments().at("w.exp_avg").boxes.size(), 2u);
}

// --- files ---------------------------------------------------------------------------------------

TEST_F(CatalogDefects, TruncatedFile) {
  fs::resize_file(path(kSecond), fs::file_size(path(kSecond)) - 1);
  expect_refusal(AllOf(HasSubstr(kSecond), HasSubstr("truncated")));
}

TEST_F(CatalogDefects, LongerFile) {
  fs::resize_file(path(kSecond), fs::file_size(path(kSecond)) + 1);
  expect_refusal(AllOf(HasSubstr(kSecond), HasSubstr("damaged")));
}

TEST_F(CatalogDefects, EmptyFile) {
  fs::resize_file(path(kFirst), 0);
  expect_refusal(AllOf(HasSubstr(kFirst), HasSubstr("has 0 bytes instead of ")));
}

TEST_F(CatalogDefects, MissingFile) {
  fs::remove(path(kSecond));
  expect_refusal(HasSubstr(kSecond));
}

TEST_F(CatalogDefects, FlippedBitAnywhereInAHeader) {
  const int64_t header_bytes = stored_.records[0].files[0].header_bytes;
  for (int64_t byte = 0; byte < header_bytes; ++byte) {
    flip(kFirst, byte);
    expect_refusal(HasSubstr(kFirst));
    flip(kFirst, byte);
  }
  TensorCatalog catalog(path());
}

TEST_F(CatalogDefects, FlippedBitAnywhereInTheDataIsFoundWhereItIsRead) {
  const RankRecord::File& file = stored_.records[0].files[0];
  const TensorCatalog catalog(path());
  for (int64_t byte = file.header_bytes; byte < file.bytes; byte += 5) {
    flip(kFirst, byte);
    const int64_t block = byte / kBlock;
    for (int64_t row = 0; row < 4; ++row) {
      std::vector<std::byte> into(64);
      std::vector<FileRun> wanted;
      add_runs(catalog.model().at("w"), packed({{row, 0}, {1, 16}}, 0), into.data(), wanted);
      ASSERT_EQ(wanted.size(), 1u);
      const bool reads_block = wanted[0].offset / kBlock <= block &&
                               block <= (wanted[0].offset + wanted[0].bytes - 1) / kBlock;
      const auto read = [&] { read_runs(catalog.files(), wanted); };
      if (reads_block) {
        EXPECT_THAT(read, ThrowsMessage<Error>(AllOf(
                              HasSubstr(path(kFirst)),
                              HasSubstr(concat("bytes ", block * kBlock, " to ",
                                               std::min((block + 1) * kBlock, file.bytes))))));
      } else {
        EXPECT_NO_THROW(read());
        EXPECT_TRUE(std::equal(into.begin(), into.end(), weight_.bytes.begin() + row * 64));
      }
    }
    flip(kFirst, byte);
  }
}

TEST_F(CatalogDefects, FileThatChangesWhileItIsRead) {
  const TensorCatalog catalog(path());
  fs::resize_file(path(kFirst), fs::file_size(path(kFirst)) + 8);
  std::vector<std::byte> into(64);
  std::vector<FileRun> wanted;
  add_runs(catalog.model().at("w"), packed({{0, 0}, {1, 16}}, 0), into.data(), wanted);
  EXPECT_THAT([&] { read_runs(catalog.files(), wanted); },
              ThrowsMessage<Error>(AllOf(HasSubstr(kFirst), HasSubstr("somebody changes"))));
}

// --- records and manifest ------------------------------------------------------------------------

TEST_F(CatalogDefects, DamagedRankRecord) {
  flip("ranks/00001.json", 60);
  expect_refusal(AllOf(HasSubstr("ranks/00001.json"), HasSubstr("damaged")));
}

TEST_F(CatalogDefects, TruncatedRankRecord) {
  fs::resize_file(path("ranks/00001.json"), 60);
  expect_refusal(AllOf(HasSubstr("ranks/00001.json"), HasSubstr("damaged")));
}

TEST_F(CatalogDefects, MissingRankRecord) {
  fs::remove(path("ranks/00001.json"));
  expect_refusal(HasSubstr("ranks/00001.json"));
}

TEST_F(CatalogDefects, RankRecordOfAnotherRank) {
  stored_.records[1].rank = 0;
  stored_.write_record(1);
  stored_.write_manifest();
  expect_refusal(HasSubstr("rank is 0; it must be 1"));
}

TEST_F(CatalogDefects, RankThatTheManifestDoesNotList) {
  stored_.manifest.mesh.inner = 3;
  stored_.write_manifest();
  expect_refusal(HasSubstr("files lacks ranks/00002.json"));
}

TEST_F(CatalogDefects, WorldThatNobodyCouldHaveIsRefusedAtOnce) {
  stored_.manifest.mesh = {.outer = INT32_MAX, .inner = INT32_MAX};
  stored_.write_manifest();
  expect_refusal(HasSubstr("files lacks ranks/00002.json"));
}

TEST_F(CatalogDefects, FileThatTheManifestDoesNotList) {
  std::erase_if(stored_.manifest.files, [](const auto& file) { return file.path == kSecond; });
  stored_.write_manifest();
  expect_refusal(HasSubstr(concat(kSecond, " is not described like this by the manifest")));
}

TEST_F(CatalogDefects, FileThatTheManifestDescribesOtherwise) {
  for (StoredFile& file : stored_.manifest.files)
    if (file.path == kSecond) file.crc32c ^= 1;
  stored_.write_manifest();
  expect_refusal(HasSubstr(concat(kSecond, " is not described like this by the manifest")));
}

TEST_F(CatalogDefects, FileThatNobodyWrote) {
  stored_.list({"model/00007-0.safetensors", 8, 0});
  stored_.write_manifest();
  expect_refusal(HasSubstr("no rank wrote model/00007-0.safetensors"));
}

TEST_F(CatalogDefects, FileThatTwoRanksWrote) {
  stored_.records[1].files.push_back(stored_.records[0].files[0]);
  stored_.write_record(1);
  stored_.write_manifest();
  expect_refusal(HasSubstr(concat(kFirst, " was written by another rank, too")));
}

TEST_F(CatalogDefects, FileInAnotherFolder) {
  RankRecord::File file = stored_.records[0].files[0];
  file.path = "extra/00000-0.safetensors";
  stored_.records[0].files.push_back(file);
  stored_.list({file.path, file.bytes, crc32c_of(file, kBlock)});
  stored_.write_record(0);
  stored_.write_manifest();
  expect_refusal(HasSubstr("neither in model/ nor in optimizer/"));
}

TEST_F(CatalogDefects, FlippedBitAnywhereInTheManifest) {
  const auto bytes = static_cast<int64_t>(fs::file_size(path("manifest.json")));
  for (int64_t byte = 0; byte < bytes; ++byte) {
    flip("manifest.json", byte);
    expect_refusal(HasSubstr("manifest.json"));
    flip("manifest.json", byte);
  }
  TensorCatalog catalog(path());
}

TEST_F(CatalogDefects, DamagedManifest) {
  fs::resize_file(path("manifest.json"), fs::file_size(path("manifest.json")) / 2);
  expect_refusal(AllOf(HasSubstr("manifest.json"), HasSubstr("not valid JSON")));
}

// --- tensors -------------------------------------------------------------------------------------

TEST_F(CatalogDefects, TensorWithAHole) {
  write({{{0, 0}, {4, 16}}}, {{{4, 0}, {3, 16}}, {{7, 0}, {1, 7}}});
  expect_refusal(HasSubstr("'w (only 119 of its 128 elements are there)'"));
}

TEST_F(CatalogDefects, PartsThatOverlap) {
  write({{{0, 0}, {4, 16}}}, {{{3, 15}, {1, 1}}, {{4, 0}, {4, 16}}});
  expect_refusal(HasSubstr("'w (two parts of it overlap)'"));
  // As many elements as the tensor has: the overlap hides a hole.
  write({{{0, 0}, {5, 16}}}, {{{4, 0}, {3, 16}}});
  expect_refusal(HasSubstr("'w (two parts of it overlap)'"));
  // Along the last dim.
  write({{{0, 0}, {8, 8}}}, {{{0, 7}, {8, 8}}});
  expect_refusal(HasSubstr("'w (two parts of it overlap)'"));
}

TEST_F(CatalogDefects, PartOutsideTheShape) {
  replace(kSecond, 1, header_of(R"({"w": {"saved_offsets": [5, 0]}})"));
  expect_refusal(HasSubstr("'w (a part of it lies outside its shape)'"));
}

TEST_F(CatalogDefects, PartFarOutsideTheShape) {
  replace(kSecond, 1, header_of(R"({"w": {"saved_offsets": [4611686018427387000, 0]}})"));
  expect_refusal(HasSubstr("'w (a part of it lies outside its shape)'"));
}

TEST_F(CatalogDefects, TensorThatTheFilesLack) {
  stored_.manifest.model.push_back({"v", DType::kFloat32, {3}});
  stored_.write_manifest();
  expect_refusal(HasSubstr("the files lack tensors of the manifest: 'v'"));
}

TEST_F(CatalogDefects, TensorThatTheManifestDoesNotKnow) {
  stored_.manifest.model.clear();
  stored_.write_manifest();
  expect_refusal(HasSubstr("the files hold tensors the manifest does not know: 'w'"));
}

TEST_F(CatalogDefects, TensorOfAnotherTypeThanTheManifestSays) {
  stored_.manifest.model[0].dtype = DType::kInt32;
  stored_.write_manifest();
  expect_refusal(AllOf(HasSubstr("another dtype or number of dims"), HasSubstr("'w'")));
  stored_.manifest.model[0] = {"w", DType::kFloat32, {128}};
  stored_.write_manifest();
  expect_refusal(AllOf(HasSubstr("another dtype or number of dims"), HasSubstr("'w'")));
}

TEST_F(CatalogDefects, TensorOfAnotherShapeThanTheManifestSays) {
  stored_.manifest.model[0].shape = {9, 16};
  stored_.write_manifest();
  expect_refusal(HasSubstr("only 128 of its 144 elements are there"));
  stored_.manifest.model[0].shape = {7, 16};
  stored_.write_manifest();
  expect_refusal(HasSubstr("outside its shape"));
}

TEST_F(CatalogDefects, PartsOfDifferentTypesOrDims) {
  replace(kSecond, 1, header_of(R"({"w": {"saved_offsets": [4, 0]}})", {4, 16}, DType::kFloat16));
  expect_refusal(HasSubstr("is fp16 here and fp32 elsewhere"));
  replace(kSecond, 1, header_of(R"({"w": {"saved_offsets": [4]}})", {64}));
  expect_refusal(HasSubstr("has 1 dims here and 2 elsewhere"));
}

TEST_F(CatalogDefects, BrokenShardingInfo) {
  const auto expect = [&](const char* info, const char* words) {
    replace(kSecond, 1, header_of(info));
    expect_refusal(AllOf(HasSubstr(kSecond), HasSubstr(words)));
  };
  expect("{\"w\": ", "not valid JSON");
  expect("[]", "DCP_SHARDING_INFO is not a JSON object");
  expect("{}", "'w' is missing in DCP_SHARDING_INFO");
  expect("{\"w\": 3}", "must be an object");
  expect("{\"w\": {}}", "saved_offsets is missing");
  expect("{\"w\": {\"saved_offsets\": 4}}", "must be an array");
  expect("{\"w\": {\"saved_offsets\": [4]}}", "has 2 dims, but 1 saved_offsets");
  for (const char* offset : {"-4", "4.0", "\"4\"", "18446744073709551615", "9223372036854775807"})
    expect(concat("{\"w\": {\"saved_offsets\": [", offset, ", 0]}}").c_str(),
           "offsets are whole numbers from 0 up");
  expect("{\"w\": {\"saved_offsets\": [4, 0]}, \"w\": {\"saved_offsets\": [4, 0]}}", "twice");
}

// At most 20 names, and how many more.
TEST(CatalogDefectNames, AreCountedBeyondTwenty) {
  const testing::TempDir directory(testing::TempDir::On::kMemory);
  std::mt19937_64 random(71);
  const TensorData data = testing::random_data(random, "w", DType::kFloat32, {3});
  const testing::RankPieces pieces{{testing::piece_of(data, {{0}, {3}})}, {}};
  auto stored = testing::write_checkpoint(directory.path(), testing::manifest_of({&data, 1}),
                                          {&pieces, 1}, {});
  for (int i = 10; i < 45; ++i)
    stored.manifest.model.push_back({concat("t", i), DType::kFloat32, {1}});
  stored.write_manifest();
  EXPECT_THAT([&] { TensorCatalog catalog(directory.path()); },
              ThrowsMessage<Error>(AllOf(HasSubstr("'t10', 't11'"), HasSubstr("'t29' and 15 more"),
                                         Not(HasSubstr("'t30'")))));
}

}  // namespace
}  // namespace fsdp::catalog_defects_test
