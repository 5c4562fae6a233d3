// The files of patches: positions in few bytes, records, and what readers refuse.
#include "fsdp/checkpoint/patches/patch_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "support/error_of.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::patch_files_test {
namespace {

using testing::change_byte;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TempDir;

std::vector<int64_t> drawn_positions(int64_t numel, double density, uint32_t seed) {
  std::mt19937 random(seed);
  std::bernoulli_distribution is_in(density);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < numel; ++i)
    if (is_in(random)) positions.push_back(i);
  return positions;
}

// Skips by the document of the format.
template <typename Number>
std::vector<std::byte> skips_of(const std::vector<int64_t>& positions) {
  std::vector<Number> numbers;
  int64_t next = 0;
  for (const int64_t position : positions) {
    for (; position - next >= largest_skip<Number>(); next += largest_skip<Number>())
      numbers.push_back(static_cast<Number>(largest_skip<Number>()));
    numbers.push_back(static_cast<Number>(position - next));
    next = position + 1;
  }
  const auto bytes = std::as_bytes(std::span(numbers));
  return {bytes.begin(), bytes.end()};
}

// --- positions -----------------------------------------------------------------------------------

TEST(PatchPositions, ComeBack) {
  const std::vector<std::vector<int64_t>> cases = {{},
                                                   {0},
                                                   {254},
                                                   {255},
                                                   {256, 511, 512, 768},
                                                   {65534},
                                                   {65535},
                                                   {65536},
                                                   {0, 1'000'000'000},
                                                   drawn_positions(100'000, 0.5, 1),
                                                   drawn_positions(100'000, 0.01, 2),
                                                   drawn_positions(1'000'000, 0.0001, 3)};
  for (const std::vector<int64_t>& positions : cases) {
    const auto count = static_cast<int64_t>(positions.size());
    EXPECT_EQ(decode_skips(skips_of<uint8_t>(positions), 1, count, 1 << 30, "x"), positions);
    EXPECT_EQ(decode_skips(skips_of<uint16_t>(positions), 2, count, 1 << 30, "x"), positions);
  }
}

TEST(PatchPositions, BeyondTheTensorAreRefused) {
  const std::vector<std::byte> skips = {std::byte{3}, std::byte{5}};
  EXPECT_THAT(error_of([&] { decode_skips(skips, 1, 2, 9, "file: 'a'"); }),
              HasSubstr("file: 'a': element 9 is beyond the tensor's last one, 8"));
  EXPECT_THAT(error_of([&] { decode_skips(skips, 1, 3, 10, "file: 'a'"); }),
              HasSubstr("has 2 positions and 3 values"));
}

// --- files ---------------------------------------------------------------------------------------

std::vector<std::byte> numbered(int64_t count) {
  std::vector<std::byte> bytes(static_cast<size_t>(2 * count));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
  return bytes;
}

// A patch of two ranks in `directory`/patch.
PatchRecord write_patch(const std::string& directory) {
  PatchRecord record{.base = "0123456789abcdef",
                     .begun = 1'700'000'000,
                     .from = 3,
                     .to = 5,
                     .names = "hf",
                     .tensors = {{"a", DType::kBFloat16, {100, 50}}, {"b", DType::kBFloat16, {7}}},
                     .files = {}};
  const std::string temporary = directory + "/.patch.tmp";
  std::filesystem::create_directories(temporary);
  const std::vector<int64_t> positions = drawn_positions(5000, 0.02, 5);
  const std::vector<std::byte> skips = skips_of<uint8_t>(positions);
  const std::vector<std::byte> sparse = numbered(static_cast<int64_t>(positions.size()));
  const FlatRange range{0, 7};
  const std::vector<std::byte> dense = numbered(range.numel());
  const StoredChange first[] = {{record.tensors[0], PositionForm::kSkips, skips, sparse}};
  const StoredChange second[] = {
      {record.tensors[1], PositionForm::kRanges, std::as_bytes(std::span(&range, 1)), dense}};
  record.files.push_back(write_patch_file(temporary, 0, first));
  record.files.push_back(write_patch_file(temporary, 1, second));
  publish_patch(temporary, directory + "/patch", record);
  return record;
}

TEST(PatchFiles, ComeBack) {
  const TempDir directory;
  const PatchRecord record = write_patch(directory.path());
  const std::string path = directory.path() + "/patch";
  EXPECT_EQ(read_patch_record(path), record);
  verify_patch_files(path, record);
  std::vector<std::string> seen;
  for_each_change(path, record, [&](const PatchChange& change) {
    seen.push_back(change.tensor.name);
    const auto count = static_cast<int64_t>(change.values.size()) / 2;
    const std::vector<std::byte> values(change.values.begin(), change.values.end());
    EXPECT_EQ(values, numbered(count));
    const bool is_dense = change.tensor.name == "b";
    EXPECT_EQ(change.ranges, std::vector<FlatRange>(is_dense ? 1 : 0, FlatRange{0, 7}));
    EXPECT_EQ(std::vector<int64_t>(change.positions.begin(), change.positions.end()),
              is_dense ? std::vector<int64_t>{} : drawn_positions(5000, 0.02, 5));
  });
  EXPECT_EQ(seen, (std::vector<std::string>{"a", "b"}));
}

TEST(PatchFiles, DamageIsFound) {
  const TempDir directory;
  const PatchRecord record = write_patch(directory.path());
  const std::string path = directory.path() + "/patch";
  const auto verify = [&] { verify_patch_files(path, read_patch_record(path)); };
  for (const char* file : {"/00000.safetensors", "/00001.safetensors"}) {
    const std::string name = path + file;
    const std::string text = testing::read_text(name);
    for (const int64_t offset : {0, 20, -1}) {
      change_byte(name, offset);
      EXPECT_THAT(error_of(verify), HasSubstr("is not what was written; the patch is damaged"));
      testing::write_text(name, text);
    }
    testing::write_text(name, text.substr(1));
    EXPECT_THAT(error_of(verify), HasSubstr("bytes and not"));
    std::filesystem::remove(name);
    EXPECT_THAT(error_of(verify), HasSubstr("is missing; the patch is damaged"));
    testing::write_text(name, text);
  }
  const std::string text = testing::read_text(path + "/patch.json");
  for (size_t i = 0; i < text.size(); i += 5) {
    change_byte(path + "/patch.json", static_cast<int64_t>(i));
    EXPECT_THAT(error_of(verify), HasSubstr("patch.json")) << i;
    testing::write_text(path + "/patch.json", text);
  }
  verify();
}

TEST(PatchFiles, AreFoundInTheirOrder) {
  EXPECT_EQ(patch_name(100, 102), "patch-00000100-00000102");
  EXPECT_EQ(patch_name(std::nullopt, 7), "patch-full-00000007");
  const TempDir directory;
  for (const auto& [from, to] : std::vector<std::pair<std::optional<int64_t>, int64_t>>{
           {5, 9}, {std::nullopt, 5}, {9, 10}, {std::nullopt, 10}}) {
    const std::string temporary = directory.path() + "/.tmp";
    std::filesystem::create_directories(temporary);
    publish_patch(temporary, concat(directory.path(), "/", patch_name(from, to)),
                  {"0123456789abcdef", 0, from, to, "hf", {}, {}});
  }
  std::filesystem::create_directories(directory.path() + "/.patch-00000010-00000012.id.tmp");
  std::filesystem::create_directories(directory.path() + "/patch-00000010-00000012");
  std::vector<std::string> names;
  for (const std::string& path : patches_in(directory.path()))
    names.push_back(std::filesystem::path(path).filename().string());
  EXPECT_EQ(names, (std::vector<std::string>{"patch-full-00000005", "patch-00000005-00000009",
                                             "patch-full-00000010", "patch-00000009-00000010",
                                             "patch-00000010-00000012"}));
  EXPECT_THAT(error_of([&] { read_patch_record(patches_in(directory.path()).back()); }),
              HasSubstr("patch-00000010-00000012 is no patch: it has no patch.json"));
  remove_patch_leftovers(directory.path());
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/.patch-00000010-00000012.id.tmp"));
  EXPECT_EQ(patches_in(directory.path()).size(), 5u);
}

}  // namespace
}  // namespace fsdp::patch_files_test
