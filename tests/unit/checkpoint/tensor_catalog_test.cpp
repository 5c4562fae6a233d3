// Checkpoints and files of others that are opened, and every way they can be broken: a sentence
// that names the file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <tuple>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "support/stored_checkpoint.h"
#include "support/temp_dir.h"

namespace fsdp::tensor_catalog_test {
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
  CatalogDefects() { write_good(); }

  void write_good() { stored_ = write({{{0, 0}, {4, 16}}}, {{{4, 0}, {4, 16}}}); }

  // The boxes of "w" that each rank writes.
  testing::StoredCheckpoint write(const std::vector<Box>& first, const std::vector<Box>& second) {
    remove_tree(path());
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

// --- files, records and manifests ----------------------------------------------------------------

TEST_F(CatalogDefects, OfFilesAreNamedWithTheFile) {
  const std::string record = "ranks/00001.json";
  const std::string manifest = "manifest.json";
  const auto resize = [&](const std::string& file, int64_t by) {
    fs::resize_file(path(file),
                    static_cast<uintmax_t>(static_cast<int64_t>(fs::file_size(path(file))) + by));
  };
  const std::tuple<std::string, std::function<void(const std::string&)>, const char*> defects[] = {
      {kSecond, [&](const auto& file) { resize(file, -1); }, "truncated"},
      {kSecond, [&](const auto& file) { resize(file, 1); }, "damaged"},
      {kFirst, [&](const auto& file) { fs::resize_file(path(file), 0); }, "has 0 bytes instead"},
      {kSecond, [&](const auto& file) { fs::remove(path(file)); }, ""},
      {record, [&](const auto& file) { flip(file, 60); }, "damaged"},
      {record, [&](const auto& file) { fs::resize_file(path(file), 60); }, "damaged"},
      {record, [&](const auto& file) { fs::remove(path(file)); }, ""},
      {manifest, [&](const auto& file) { resize(file, -300); }, "not valid JSON"}};
  for (const auto& [file, damage, words] : defects) {
    write_good();
    damage(file);
    expect_refusal(AllOf(HasSubstr(file), HasSubstr(words)));
  }
}

// Checksums are right: records and manifest do not fit each other.
TEST_F(CatalogDefects, OfWhatDoesNotFitTogetherAreNamed) {
  Manifest& manifest = stored_.manifest;
  std::vector<RankRecord>& records = stored_.records;
  const std::pair<std::function<void()>, std::string> defects[] = {
      {[&] { records[1].rank = 0; }, "rank is 0; it must be 1"},
      {[&] { manifest.mesh.inner = 3; }, "files lacks ranks/00002.json"},
      {[&] { manifest.mesh = {.outer = INT32_MAX, .inner = INT32_MAX}; },
       "files lacks ranks/00002.json"},
      {[&] {
         std::erase_if(manifest.files, [](const auto& file) { return file.path == kSecond; });
       },
       concat(kSecond, " is not described like this by the manifest")},
      {[&] {
         stored_.list({kSecond, records[1].files[0].bytes, 1});
       },
       concat(kSecond, " is not described like this by the manifest")},
      {[&] {
         stored_.list({"model/00007-0.safetensors", 8, 0});
       },
       "no rank wrote model/00007-0.safetensors"},
      {[&] { records[1].files.push_back(records[0].files[0]); },
       concat(kFirst, " was written by another rank, too")},
      {[&] {
         RankRecord::File file = records[0].files[0];
         file.path = "extra/00000-0.safetensors";
         stored_.list({file.path, file.bytes, crc32c_of(file, kBlock)});
         records[0].files.push_back(std::move(file));
       },
       "neither in model/ nor in optimizer/"},
      {[&] {
         manifest.model.push_back({"v", DType::kFloat32, {3}});
       },
       "the files lack tensors of the manifest: 'v'"},
      {[&] { manifest.model.clear(); }, "the files hold tensors the manifest does not know: 'w'"},
      {[&] { manifest.model[0].dtype = DType::kInt32; },
       "tensors have another dtype or number of dims than the manifest says: 'w'"},
      {[&] { manifest.model[0].shape = {128}; },
       "tensors have another dtype or number of dims than the manifest says: 'w'"},
      {[&] {
         manifest.model[0].shape = {9, 16};
       },
       "only 128 of its 144 elements are there"},
      {[&] {
         manifest.model[0].shape = {7, 16};
       },
       "outside its shape"}};
  for (const auto& [change, words] : defects) {
    write_good();
    change();
    const auto rank_of = [&](size_t i) { return static_cast<int64_t>(i); };
    for (size_t i = 0; i < records.size(); ++i) {
      write_file_durably(path(rank_record_path(rank_of(i))), to_json(records[i]));
      stored_.list(described(rank_record_path(rank_of(i)), to_json(records[i])));
    }
    stored_.write_manifest();
    expect_refusal(HasSubstr(words));
  }
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

// --- tensors -------------------------------------------------------------------------------------

TEST_F(CatalogDefects, PartOutsideTheShape) {
  for (const char* offset : {"5", "4611686018427387000"}) {
    replace(kSecond, 1, header_of(concat(R"({"w": {"saved_offsets": [)", offset, ", 0]}}")));
    expect_refusal(HasSubstr("'w (a part of it lies outside its shape)'"));
  }
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
  for (const char* value : {"3", "{}", "{\"saved_offsets\": 4}"})
    expect(concat("{\"w\": ", value, "}").c_str(), "w has no saved_offsets that are whole numbers");
  expect("{\"w\": {\"saved_offsets\": [4]}}", "has 2 dims, but 1 saved_offsets");
  for (const char* offset : {"-4", "4.0", "\"4\"", "18446744073709551615", "9223372036854775807"})
    expect(concat("{\"w\": {\"saved_offsets\": [", offset, ", 0]}}").c_str(),
           "w has no saved_offsets that are whole numbers from 0 up");
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

// --- plain files ---------------------------------------------------------------------------------

// Safetensors files of other tools, without checksums: alone, in a directory, with an index.

class PlainFiles : public ::testing::Test {
 protected:
  void write(const std::string& file, std::vector<SafetensorsEntry> tensors,
             const std::string& sharding_info = "") {
    SafetensorsHeader header;
    header.tensors = std::move(tensors);
    if (!sharding_info.empty()) header.metadata["DCP_SHARDING_INFO"] = sharding_info;
    std::string bytes = write_safetensors_header(header);
    for (const SafetensorsEntry& entry : header.tensors)
      bytes.append(static_cast<size_t>(entry.end - entry.begin), 'x');
    write_file_durably(directory_ / file, bytes);
  }

  static SafetensorsEntry entry(const std::string& name, std::vector<int64_t> shape) {
    return {.name = name, .dtype = DType::kFloat32, .shape = std::move(shape)};
  }

  void write_index(const std::string& weight_map, const std::string& name = "model") {
    write_file_durably(directory_ / (name + ".safetensors.index.json"),
                       concat("{\"weight_map\": ", weight_map, "}"));
  }

  template <typename Matcher>
  void expect_refusal(const Matcher& words) {
    EXPECT_THAT([&] { TensorCatalog catalog(directory_.path()); }, ThrowsMessage<Error>(words));
  }

  testing::TempDir directory_{testing::TempDir::On::kMemory};
};

TEST_F(PlainFiles, AreReadAloneAndTogether) {
  write("a.safetensors", {entry("w", {2, 3})});
  write("b.safetensors", {entry("v", {}), entry("none", {0, 4})});
  EXPECT_EQ(TensorCatalog(directory_ / "a.safetensors").model().size(), 1u);
  EXPECT_EQ(TensorCatalog(directory_.path()).model().size(), 3u);
}

TEST_F(PlainFiles, OfAnIndexAreTheOnlyOnesThatCount) {
  write("a.safetensors", {entry("w", {2})});
  write("b.safetensors", {entry("w", {2})});
  write_index(R"({"w": "b.safetensors"})");
  EXPECT_EQ(TensorCatalog(directory_.path()).model().at("w").boxes.size(), 1u);
}

// Models are published in several formats at once.
TEST_F(PlainFiles, OfAnIndexOfAnotherFormatDoNotCount) {
  write("model.safetensors", {entry("w", {2})});
  write_file_durably(directory_ / "pytorch_model.bin.index.json",
                     R"({"weight_map": {"w": "pytorch_model-00001-of-00002.bin"}})");
  EXPECT_EQ(TensorCatalog(directory_.path()).model().size(), 1u);
}

TEST_F(PlainFiles, OutsideTheDirectoryAreNotOpened) {
  write("a.safetensors", {entry("w", {2})});
  for (const char* name : {"../a.safetensors", "/etc/passwd", "x/a.safetensors", "", "a\\nb"}) {
    write_index(concat("{\"w\": \"", name, "\"}"));
    expect_refusal(AllOf(HasSubstr("index.json"), HasSubstr("'w' is no plain file name")));
  }
}

TEST_F(PlainFiles, OfAnIndexThatIsNoneAreNotGuessed) {
  write("a.safetensors", {entry("w", {2})});
  write_index("[]");
  expect_refusal(AllOf(HasSubstr("index.json"), HasSubstr("has no weight_map")));
  write_index(R"({"w": 3})");
  expect_refusal(HasSubstr("'w' is no plain file name"));
  write_file_durably(directory_ / "model.safetensors.index.json", "[1]");
  expect_refusal(HasSubstr("has no weight_map"));
  write_index(R"({"w": "b.safetensors"})");
  expect_refusal(HasSubstr("b.safetensors"));
}

TEST_F(PlainFiles, WithATensorTwiceAreRefused) {
  write("a.safetensors", {entry("w", {2})});
  write("b.safetensors", {entry("w", {2})});
  expect_refusal(AllOf(HasSubstr(directory_.path()), HasSubstr("'w (two parts of it overlap)'")));
}

TEST_F(PlainFiles, WithoutTensorsAreRefusedWithWhatToGive) {
  expect_refusal(HasSubstr("give a checkpoint"));
  EXPECT_THAT([&] { TensorCatalog catalog(directory_ / "nothing"); },
              ThrowsMessage<Error>(HasSubstr("does not exist")));
}

// The shape is as far as parts reach: it must not be believed before it is covered.
TEST_F(PlainFiles, ThatReachBeyondAnyTensorAreRefused) {
  for (const char* offsets : {"[4611686018427387900, 4611686018427387900]", "[1000000000, 4]",
                              "[4611686018427387900, 0]"}) {
    write("a.safetensors", {entry("w", {1, 1})},
          concat("{\"w\": {\"saved_offsets\": ", offsets, "}}"));
    expect_refusal(AllOf(HasSubstr(directory_.path()), HasSubstr("'w (only 1 of its ")));
  }
}

TEST_F(PlainFiles, WithSizesBesideAZeroAreRead) {
  const int64_t huge = INT64_MAX;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{huge, huge, 0}, {0, huge, huge}, {huge, 0, huge}}) {
    write("a.safetensors", {entry("w", shape), entry("v", {2})});
    EXPECT_EQ(TensorCatalog(directory_.path()).model().at("w").tensor.shape, shape);
  }
  write("a.safetensors", {entry("w", {huge, 0})}, R"({"w": {"saved_offsets": [1, 0]}})");
  expect_refusal(AllOf(HasSubstr("a.safetensors"), HasSubstr("'w'")));
}

}  // namespace
}  // namespace fsdp::tensor_catalog_test
