// Patches applied to weights in files: bits, order, and everything that is refused.
#include "fsdp/checkpoint/patches/applied_patches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "support/error_of.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::applied_patches_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TempDir;

constexpr const char* kBase = "0123456789abcdef";

const StoredTensor kA{"a", DType::kFloat32, {2, 3}};
const StoredTensor kB{"b", DType::kFloat32, {4}};

struct Changed {
  StoredTensor tensor;
  std::vector<FlatRange> ranges;
  std::vector<uint8_t> skips;  // if there are no ranges
  std::vector<float> values;
};

// A patch of one rank; returns its path.
std::string write_patch(const TempDir& directory, std::optional<int64_t> from, int64_t to,
                        const std::vector<Changed>& changed, const std::string& base = kBase) {
  const std::string temporary = directory.path() + "/.tmp";
  std::filesystem::create_directories(temporary);
  std::vector<StoredChange> changes;
  for (const Changed& each : changed)
    changes.push_back({each.tensor,
                       each.ranges.empty() ? PositionForm::kSkips : PositionForm::kRanges,
                       each.ranges.empty() ? std::as_bytes(std::span(each.skips))
                                           : std::as_bytes(std::span(each.ranges)),
                       std::as_bytes(std::span(each.values))});
  PatchRecord record{base, 0, from, to, "hf", {kA, kB}, {}};
  record.files.push_back(write_patch_file(temporary, 0, changes));
  const std::string path = concat(directory.path(), "/", base, patch_name(from, to));
  publish_patch(temporary, path, record);
  return path;
}

// Writes what apply_patch leaves when it is interrupted.
void put_applied(const std::string& weights, const std::string& fields) {
  testing::write_text(weights + "/patches-applied.json",
                      with_checksum(concat("{\n \"base\": \"", kBase, "\",\n ", fields, "\n}\n")));
}

std::string full_patch(const TempDir& directory, int64_t to, float first,
                       const std::string& base = kBase) {
  return write_patch(directory, std::nullopt, to,
                     {{kA, {{0, 6}}, {}, {first, 1, 2, 3, 4, 5}}, {kB, {{0, 4}}, {}, {6, 7, 8, 9}}},
                     base);
}

// Weights in two files; the second has a tensor that no patch knows.
std::string weights_in(const TempDir& directory) {
  const std::string path = directory.path() + "/weights";
  testing::write_plain_file(path + "/model-00001-of-00002.safetensors",
                            {testing::counting("a", {2, 3}, 50.0f)});
  testing::write_plain_file(
      path + "/model-00002-of-00002.safetensors",
      {testing::counting("b", {4}, 60.0f), testing::counting("other", {1}, 70.0f)});
  return path;
}

std::vector<float> values_in(const std::string& path, const std::string& file, size_t count) {
  const std::string text = testing::read_text(concat(path, "/", file));
  std::vector<float> values(count);
  std::memcpy(values.data(), text.data() + text.size() - count * sizeof(float),
              count * sizeof(float));
  return values;
}
std::vector<float> first_of(const std::string& path) {
  return values_in(path, "model-00001-of-00002.safetensors", 6);
}
std::vector<float> second_of(const std::string& path) {
  return values_in(path, "model-00002-of-00002.safetensors", 5);
}

TEST(AppliedPatches, ChangeWeightsInPlace) {
  const TempDir directory;
  const std::string weights = weights_in(directory);
  apply_patch(full_patch(directory, 3, 0), weights);
  EXPECT_EQ(first_of(weights), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(second_of(weights), (std::vector<float>{6, 7, 8, 9, 70}));
  EXPECT_EQ(read_applied(weights), (AppliedPatch{kBase, 3}));

  const AppliedChanges changes =
      apply_patch(write_patch(directory, 3, 5, {{kA, {}, {1, 2}, {-1, -4}}}), weights);
  EXPECT_EQ(changes.num_elements, 2);
  EXPECT_EQ(changes.num_tensors, 1);
  EXPECT_EQ(first_of(weights), (std::vector<float>{0, -1, 2, 3, -4, 5}));
  EXPECT_EQ(read_applied(weights), (AppliedPatch{kBase, 5}));

  apply_patch(full_patch(directory, 1, 42, "00000000000000ff"), weights);  // another stream
  EXPECT_EQ(first_of(weights), (std::vector<float>{42, 1, 2, 3, 4, 5}));
}

TEST(AppliedPatches, AreRefusedOutOfOrder) {
  const TempDir directory;
  const std::string weights = weights_in(directory);
  const std::string next = write_patch(directory, 3, 5, {{kA, {}, {1}, {-1}}});
  EXPECT_THAT(error_of([&] { apply_patch(next, weights); }),
              HasSubstr("leads from step 3 of base 0123456789abcdef, but no patch was applied yet; "
                        "begin with a full one"));
  apply_patch(full_patch(directory, 2, 0), weights);
  EXPECT_THAT(error_of([&] { apply_patch(next, weights); }),
              HasSubstr("leads from step 3, but the weights are of step 2; apply the patches "
                        "between them first"));
  apply_patch(write_patch(directory, 2, 3, {}), weights);
  apply_patch(next, weights);
  EXPECT_THAT(
      error_of([&] { apply_patch(next, weights); }),
      HasSubstr("leads from step 3, but the weights are of step 5; it was applied already"));
  const std::string other = write_patch(directory, 5, 6, {{kA, {}, {1}, {-2}}}, "00000000000000ff");
  EXPECT_THAT(error_of([&] { apply_patch(other, weights); }),
              HasSubstr("is of base 00000000000000ff, but the weights are of base "
                        "0123456789abcdef"));
  EXPECT_EQ(first_of(weights), (std::vector<float>{0, -1, 2, 3, 4, 5}));
}

TEST(AppliedPatches, AreRefusedForOtherWeights) {
  const TempDir directory;
  const std::string patch = full_patch(directory, 3, 0);
  const std::string missing = directory.path() + "/missing";
  testing::write_plain_file(missing + "/model.safetensors", {testing::counting("a", {2, 3})});
  EXPECT_THAT(error_of([&] { apply_patch(patch, missing); }), HasSubstr("has no tensor 'b'"));
  const std::string narrow = directory.path() + "/narrow";
  testing::write_plain_file(
      narrow + "/model.safetensors",
      {testing::counting("b", {4}),
       testing::whole_tensor("a", {2, 3}, std::vector<uint16_t>(6), DType::kBFloat16)});
  EXPECT_THAT(error_of([&] { apply_patch(patch, narrow); }),
              HasSubstr("'a' is bf16 [2, 3] and in the patch fp32 [2, 3]"));
}

// publish_crash_test applies the same patch again after every instant.
TEST(AppliedPatches, AfterOneThatWasInterruptedOthersAreRefused) {
  const TempDir directory;
  const std::string weights = weights_in(directory);
  apply_patch(full_patch(directory, 3, 0), weights);
  const std::string other = write_patch(directory, 3, 4, {{kA, {}, {1}, {-1}}});
  put_applied(weights, "\"step\": -1,\n \"applying\": 3");
  EXPECT_THAT(error_of([&] { apply_patch(other, weights); }),
              HasSubstr("applying a full patch was interrupted; apply that one again first"));
  testing::change_byte(weights + "/patches-applied.json", 12);
  EXPECT_THAT(error_of([&] { apply_patch(other, weights); }), HasSubstr("is not what was written"));
  put_applied(weights, "\"step\": 3,\n \"applying\": 5");
  EXPECT_THAT(error_of([&] { apply_patch(other, weights); }),
              HasSubstr("leads to step 4, but applying the one to step 5 was interrupted"));
  apply_patch(write_patch(directory, 3, 5, {{kA, {}, {1}, {-2}}}), weights);
  EXPECT_EQ(first_of(weights)[1], -2.0f);
  EXPECT_EQ(read_applied(weights), (AppliedPatch{kBase, 5}));
}

TEST(AppliedPatches, LeaveSharedFilesAlone) {
  const TempDir directory;
  const std::string weights = weights_in(directory);
  const std::string cache = directory.path() + "/cache";
  std::filesystem::create_directories(cache);
  const std::string first = weights + "/model-00001-of-00002.safetensors";
  const std::string second = weights + "/model-00002-of-00002.safetensors";
  std::filesystem::rename(first, cache + "/1");
  std::filesystem::create_symlink(cache + "/1", first);
  std::filesystem::create_hard_link(second, cache + "/2");
  const std::string before[] = {testing::read_text(cache + "/1"), testing::read_text(cache + "/2")};
  testing::write_text(weights + "/.patches-applied.json.0123.tmp", "left by a crash");
  apply_patch(full_patch(directory, 3, 0), weights);
  EXPECT_EQ(first_of(weights), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(second_of(weights), (std::vector<float>{6, 7, 8, 9, 70}));
  EXPECT_EQ(testing::read_text(cache + "/1"), before[0]);
  EXPECT_EQ(testing::read_text(cache + "/2"), before[1]);
  EXPECT_EQ(names_in(weights).size(), 3u);  // no copies, no leftovers
}

// --- a directory of patches ----------------------------------------------------------------------

class DirectoryOfPatches : public ::testing::Test {
 protected:
  // The full patch of step 0, then steps 0 to 1, 1 to 2 and so on; element 0 of `a` has the step.
  void put(std::optional<int64_t> from, int64_t to) {
    std::string path;
    if (from)
      path = write_patch(directory_, from, to, {{kA, {}, {0}, {static_cast<float>(to)}}});
    else
      path = full_patch(directory_, to, static_cast<float>(to));
    std::filesystem::create_directories(patches_);
    std::filesystem::rename(path, place(from, to));
  }
  std::string place(std::optional<int64_t> from, int64_t to) const {
    return concat(patches_, "/", patch_name(from, to));
  }
  std::string error() const {
    return error_of([&] {
      apply_new_patches(patches_, weights_, [](const std::string&, const AppliedChanges&) {});
    });
  }
  void expect_step(int64_t step) const {
    EXPECT_EQ(read_applied(weights_), (AppliedPatch{kBase, step}));
    EXPECT_EQ(first_of(weights_)[0], static_cast<float>(step));
  }

  const TempDir directory_;
  const std::string weights_ = weights_in(directory_);
  const std::string patches_ = directory_.path() + "/patches";
};

TEST_F(DirectoryOfPatches, WithoutAFullOneDoesNotBegin) {
  put(0, 1);
  EXPECT_THAT(error(), HasSubstr("has the weights of no known step, and no patch in"));
  EXPECT_EQ(first_of(weights_)[0], 50.0f);
}

TEST_F(DirectoryOfPatches, SaysWhatIsMissingAfterALostOne) {
  for (int64_t step = 0; step < 3; ++step) put(step, step + 1);
  put(std::nullopt, 0);
  remove_tree(place(1, 2));
  EXPECT_THAT(error(), AllOf(HasSubstr("has the weights of step 1, and no patch in "),
                             HasSubstr("/patch-00000002-00000003 (step 2 to 3 of base")));
  expect_step(1);
  put(std::nullopt, 3);
  EXPECT_EQ(error(), "");
  expect_step(3);
}

TEST_F(DirectoryOfPatches, PassesOverADamagedOneWhereANewerFullOneIsThere) {
  put(std::nullopt, 0);
  put(0, 1);
  put(1, 2);
  testing::change_byte(place(0, 1) + "/00000.safetensors", -1);
  EXPECT_THAT(error(), AllOf(HasSubstr("has the weights of step 0 and goes no further, because "),
                             HasSubstr("00000.safetensors is not what was written")));
  expect_step(0);
  put(std::nullopt, 2);
  EXPECT_EQ(error(), "");
  expect_step(2);
}

}  // namespace
}  // namespace fsdp::applied_patches_test
