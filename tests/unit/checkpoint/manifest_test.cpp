// Manifests: read back as written, and refused if they cannot be true.
#include "fsdp/checkpoint/format/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "support/resealed.h"

namespace fsdp::manifest_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;
using Json = nlohmann::json;
using testing::resealed;

// Every field has a value of its own; texts have characters that JSON must escape.
Manifest full_manifest() {
  const std::string text = "a.7\"\\/ \n\t\u00fc";
  Manifest manifest;
  manifest.step = kMaxStoredSteps;
  manifest.mesh = {.outer = 3, .inner = INT32_MAX};
  manifest.strategy = text + "1";
  manifest.precision = text + "2";
  manifest.schedule = text + "3";
  manifest.optimizer = {.name = text + "4",
                        .moments = {"exp_avg", text},
                        .step = kMaxStoredSteps,
                        .skipped = 2,
                        .loss_scale = 1.0 / 3.0,
                        .good_steps = 5,
                        .settings = text + "5",
                        .late_updates = {{"w", 4}, {text, 0}}};
  const GroupRecord group{
      .dtype = DType::kBFloat16,
      .is_trainable = false,
      .granularity = "row",
      .padded_numel = INT64_MAX,
      .members = {{"w", {"v", text}, {2, 3}, {1, INT64_MAX}}, {text, {}, {}, {0, 0}}}};
  manifest.units = {{.name = text, .groups = {group, {}}}, {.name = "", .groups = {}}};
  for (const DType dtype : all_dtypes())
    manifest.model.push_back({concat(name_of(dtype), text), dtype, {7, 0, 1000}});
  manifest.moments = {{"w.exp_avg", DType::kFloat32, {}}};
  manifest.files = {{"model/0.safetensors", INT64_MAX, UINT32_MAX}, {"ranks/00000.json", 0, 1}};
  return manifest;
}

TEST(Manifest, IsReadBackAsWritten) {
  for (const Manifest& manifest : {full_manifest(), Manifest()}) {
    const std::string text = to_json(manifest);
    EXPECT_EQ(parse_manifest(text, "manifest.json"), manifest) << text;
    EXPECT_EQ(to_json(parse_manifest(text, "manifest.json")), text);
  }
}

TEST(RankRecord, IsReadBackAsWritten) {
  RankRecord record{.rank = 100000,
                    .block_bytes = 10,
                    .files = {{"optimizer/1.safetensors", 25, 25, UINT32_MAX, {1, UINT32_MAX, 0}},
                              {"model/1.safetensors", 0, 0, 0, {}}},
                    .random_state = "",
                    .data_position = "\"\\\n\u00fc"};
  for (int i = 0; i < 300; ++i) {  // every length of base64's end
    EXPECT_EQ(parse_rank_record(to_json(record), "ranks/00000.json"), record);
    record.random_state.push_back(static_cast<char>(7 * i));
  }
}

TEST(Manifest, IsReadFromVersion1WhichHadNoChecksum) {
  const Manifest manifest = full_manifest();
  Json old = Json::parse(to_json(manifest));
  old["version"] = 1;
  EXPECT_THAT([&] { parse_manifest(resealed(old), "manifest.json"); },
              ThrowsMessage<Error>(HasSubstr("a manifest of version 1 has none")));
  old.erase("crc32c");
  EXPECT_EQ(parse_manifest(old.dump(), "manifest.json"), manifest);
  old["version"] = 2;
  EXPECT_THAT([&] { parse_manifest(old.dump(), "manifest.json"); },
              ThrowsMessage<Error>(HasSubstr("crc32c is missing")));
  // Somebody else's line breaks.
  EXPECT_THAT([&] { parse_manifest(Json::parse(to_json(manifest)).dump(), "manifest.json"); },
              ThrowsMessage<Error>(HasSubstr("it was changed, so use another checkpoint")));
}

// --- refusals --------------------------------------------------------------------------------

Manifest small_manifest() {
  Manifest manifest;
  manifest.step = 7;
  manifest.mesh = {.outer = 1, .inner = 2};
  manifest.optimizer = {
      .name = "AdamW", .moments = {"exp_avg"}, .step = 7, .late_updates = {{"w", 5}}};
  manifest.units = {{.name = "blocks.0", .groups = std::vector<GroupRecord>(1)}};
  manifest.units[0].groups[0].members = {{"w", {"v"}, {2, 3}, {0, 6}}};
  manifest.model = {{"w", DType::kFloat32, {2, 3}}, {"b", DType::kBFloat16, {}}};
  manifest.moments = {{"w.exp_avg", DType::kFloat32, {2, 3}}};
  manifest.files = {{"model/00000-0.safetensors", 100, 1}, {"ranks/00000.json", 50, 2}};
  return manifest;
}

RankRecord small_record() {
  RankRecord record;
  record.rank = 1;
  record.block_bytes = 64;
  record.files = {{"model/00001-0.safetensors", 130, 128, 5, {1, 2, 3}},
                  {"optimizer/00001-0.safetensors", 64, 64, 6, {7}}};
  return record;
}

// Changes one value of a good document, found by its JSON pointer.
template <typename Matcher>
void expect_refusal_of_manifest(const std::string& pointer, const Json& value,
                                const Matcher& words) {
  Json document = Json::parse(to_json(small_manifest()));
  document[Json::json_pointer(pointer)] = value;
  EXPECT_THAT([&] { parse_manifest(resealed(document), "manifest.json"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("manifest.json: "), words)))
      << pointer << " = " << value;
}

template <typename Matcher>
void expect_refusal_of_record(const std::string& pointer, const Json& value, const Matcher& words) {
  Json document = Json::parse(to_json(small_record()));
  document[Json::json_pointer(pointer)] = value;
  EXPECT_THAT([&] { parse_rank_record(document.dump(), "00001.json"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("00001.json: "), words)))
      << pointer << " = " << value;
}

// White space, names of fields and the checksum itself included.
TEST(Manifest, AFlippedBitAnywhereIsRefused) {
  const std::string good = to_json(small_manifest());
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string text = good;
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_THAT([&] { parse_manifest(text, "manifest.json"); },
                ThrowsMessage<Error>(AllOf(HasSubstr("manifest.json"), Not(HasSubstr("\n")))))
        << "bit " << bit;
  }
}

TEST(Manifest, AHigherVersionIsRefusedWithWhatToDo) {
  expect_refusal_of_manifest("/version", kCheckpointVersion + 1,
                             AllOf(HasSubstr("version is 3"), HasSubstr("newer")));
  expect_refusal_of_manifest("/version", 0, HasSubstr("count from 1"));
  expect_refusal_of_record("/version", kCheckpointVersion + 1, HasSubstr("version is 3"));
}

TEST(Manifest, AnotherFormatIsRefused) {
  expect_refusal_of_manifest("/format", "fsdp.cpp checkpoint rank", HasSubstr("format is"));
  expect_refusal_of_record("/format", "fsdp.cpp checkpoint", HasSubstr("format is"));
}

// Every field in turn, at every depth: gone, and of another kind.
void for_each_field(const Json& value, const std::string& pointer,
                    const std::function<void(const std::string& pointer)>& body) {
  if (value.is_object())
    for (const auto& [key, item] : value.items()) {
      body(concat(pointer, "/", key));
      for_each_field(item, concat(pointer, "/", key), body);
    }
  if (value.is_array())
    for (size_t i = 0; i < value.size(); ++i)
      for_each_field(value[i], concat(pointer, "/", i), body);
}

template <typename Parse>
void expect_every_field_is_needed(const std::string& text, const Parse& parse) {
  const Json good = Json::parse(text);
  int num_fields = 0;
  for_each_field(good, "", [&](const std::string& pointer) {
    ++num_fields;
    const Json::json_pointer place(pointer);
    const std::string field = place.back();
    Json wrong_kind = good;
    wrong_kind[place] = good[place].is_object() ? Json("x") : Json::object();
    EXPECT_THAT([&] { parse(wrong_kind.dump()); }, ThrowsMessage<Error>(HasSubstr(field)))
        << pointer << " of the wrong kind";
    // Those that may be left out, and what is in one of them.
    if (field == "trainable" || field == "settings" || field == "sum_group" ||
        pointer.find("/late_updates") != pointer.npos)
      return;
    Json without = good;
    without[place.parent_pointer()].erase(field);
    EXPECT_THAT([&] { parse(without.dump()); },
                ThrowsMessage<Error>(AllOf(HasSubstr("file: "), HasSubstr(field))))
        << pointer << " missing";
  });
  EXPECT_GT(num_fields, 10);
}

TEST(Manifest, EveryFieldIsNeededAndOfItsKind) {
  Json manifest = Json::parse(to_json(small_manifest()));
  manifest.erase("crc32c");
  expect_every_field_is_needed(manifest.dump(), [](const std::string& text) {
    parse_manifest(resealed(Json::parse(text)), "file");
  });
}

TEST(RankRecord, EveryFieldIsNeededAndOfItsKind) {
  expect_every_field_is_needed(to_json(small_record()),
                               [](const std::string& text) { parse_rank_record(text, "file"); });
}

TEST(Manifest, NegativeCountsAreRefused) {
  for (const char* pointer :
       {"/step", "/mesh/outer", "/mesh/inner", "/optimizer/step", "/optimizer/skipped",
        "/optimizer/good_steps", "/units/0/groups/0/padded_numel", "/files/0/bytes"})
    expect_refusal_of_manifest(pointer, -1, HasSubstr("is -1; it must be at least"));
  for (const char* pointer : {"/model/0/shape/1", "/units/0/groups/0/members/0/shape/0"})
    expect_refusal_of_manifest(pointer, -3, HasSubstr("whole numbers from 0 up"));
  expect_refusal_of_manifest("/optimizer/late_updates/w", 8, HasSubstr("no more updates than"));
  expect_refusal_of_manifest("/mesh/inner", 0, HasSubstr("mesh.inner is 0"));
  expect_refusal_of_manifest("/optimizer/loss_scale", -2.0, HasSubstr("a number above 0"));
  for (const char* pointer : {"/rank", "/block_bytes", "/files/0/bytes", "/files/0/header_bytes"})
    expect_refusal_of_record(pointer, -1, HasSubstr("is -1; it must be at least"));
}

TEST(Manifest, SizesThatNobodyCouldCountAreRefused) {
  const int64_t huge = int64_t{1} << 62;
  expect_refusal_of_manifest("/step", UINT64_MAX, HasSubstr("whole number"));
  for (const char* pointer :
       {"/step", "/optimizer/step", "/optimizer/skipped", "/optimizer/good_steps"})
    expect_refusal_of_manifest(pointer, kMaxStoredSteps + 1, HasSubstr("so many steps"));
  expect_refusal_of_manifest("/model/0/shape", {huge, 2}, HasSubstr("so many elements"));
  expect_refusal_of_manifest("/model/0/shape", {int64_t{1} << 60, 1}, HasSubstr("many elements"));
  expect_refusal_of_manifest("/model/0/shape", {UINT64_MAX, 1}, HasSubstr("from 0 up"));
  expect_refusal_of_manifest("/model/0/shape", {1.5, 1}, HasSubstr("from 0 up"));
  expect_refusal_of_manifest("/mesh/outer", int64_t{INT32_MAX} + 1, HasSubstr("many ranks"));
  expect_refusal_of_manifest("/mesh/inner", int64_t{INT32_MAX} + 1, HasSubstr("many ranks"));
  expect_refusal_of_manifest("/files/0/crc32c", int64_t{1} << 32, HasSubstr("32 bits"));
  expect_refusal_of_manifest("/optimizer/loss_scale", 0, HasSubstr("a number above 0"));
}

TEST(Manifest, TypesThatNobodyKnowsAreRefused) {
  for (const char* pointer : {"/model/1/dtype", "/moments/0/dtype", "/units/0/groups/0/dtype"})
    expect_refusal_of_manifest(pointer, "fp12", HasSubstr("\"fp12\"; it is not a dtype"));
}

TEST(Manifest, AFlatRangeIsNoShape) {
  Manifest manifest = small_manifest();
  // A second embedding of a large model: begin times end would not fit 64 bits.
  manifest.units[0].groups[0].members[0].flat = {int64_t{3} << 30, int64_t{6} << 30};
  EXPECT_EQ(parse_manifest(to_json(manifest), "manifest.json"), manifest);
  const std::string flat = "/units/0/groups/0/members/0/flat";
  expect_refusal_of_manifest(flat, {6, 3}, HasSubstr("it must be [begin, end]"));
  expect_refusal_of_manifest(flat, {6}, HasSubstr("it must be [begin, end]"));
  expect_refusal_of_manifest(flat, {-1, 6}, HasSubstr("flat"));
}

TEST(Manifest, ATensorWithoutElementsMayHaveAnyOtherSize) {
  Manifest manifest = small_manifest();
  manifest.model[0].shape = {int64_t{1} << 62, 0, 4};
  EXPECT_EQ(parse_manifest(to_json(manifest), "manifest.json"), manifest);
}

TEST(Manifest, NamesThatAreThereTwiceAreRefused) {
  expect_refusal_of_manifest("/model/1/name", "w",
                             AllOf(HasSubstr("model[1].name"), HasSubstr("twice")));
  expect_refusal_of_manifest("/files/1/path", "model/00000-0.safetensors", HasSubstr("twice"));
  expect_refusal_of_record("/files/1/path", "model/00001-0.safetensors", HasSubstr("twice"));
  std::string text = to_json(small_manifest());
  text.insert(text.find('{') + 1, "\"step\": 8,");
  EXPECT_THAT([&] { parse_manifest(with_checksum(text), "manifest.json"); },
              ThrowsMessage<Error>(HasSubstr("'step' twice")));
}

TEST(Manifest, PathsThatLeadOutOfTheCheckpointAreRefused) {
  const std::vector<std::string> bad = {"../x",
                                        "..",
                                        ".",
                                        "",
                                        "/etc/passwd",
                                        "//etc/passwd",
                                        "a//b",
                                        "a/./b",
                                        "a/../../b",
                                        "a/..",
                                        "./a",
                                        "a/",
                                        "a\\b",
                                        "..\\b",
                                        "C:\\b",
                                        "a\nb",
                                        "a\tb",
                                        std::string("model/a\0b", 9),
                                        "a\x7f"
                                        "b"};
  for (const std::string& path : bad) {
    expect_refusal_of_manifest("/files/0/path", path, HasSubstr("below the checkpoint"));
    expect_refusal_of_record("/files/0/path", path, HasSubstr("below the checkpoint"));
  }
  Manifest manifest = small_manifest();
  for (const char* good : {"a", ".hidden/..a", "a/b/c...", "model/00000-0.safetensors"}) {
    manifest.files[0].path = good;
    EXPECT_EQ(parse_manifest(to_json(manifest), "manifest.json"), manifest);
  }
}

TEST(RankRecord, BlocksMustBeThoseOfTheFile) {
  expect_refusal_of_record("/files/0/blocks", {1, 2}, HasSubstr("one checksum for every 64"));
  expect_refusal_of_record("/files/0/blocks", {1, 2, 3, 4}, HasSubstr("one checksum for every 64"));
  expect_refusal_of_record("/files/0/blocks/1", -1, HasSubstr("whole numbers from 0 up"));
  expect_refusal_of_record("/files/0/blocks/1", int64_t{1} << 32, HasSubstr("32 bits"));
  expect_refusal_of_record("/files/0/bytes", INT64_MAX, HasSubstr("one checksum for every 64"));
  expect_refusal_of_record("/files/0/header_bytes", 131, HasSubstr("the file is shorter"));
  expect_refusal_of_record("/block_bytes", 0, HasSubstr("at least 1"));
  // Only whole blocks can be verified, so a reader would need as much memory.
  expect_refusal_of_record("/block_bytes", INT64_MAX, HasSubstr("block_bytes"));
  expect_refusal_of_record("/random_state", "AAA", HasSubstr("base64"));
}

// The error for a nested value writes it recursively: too many levels would end the program.
TEST(Manifest, DocumentsThatAreNestedWithoutEndAreRefused) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  const std::string open = std::string(1'000'000, '[');
  for (const std::string& text : {deep, open, concat("{\"format\":", deep, "}")})
    EXPECT_THAT([&] { parse_manifest(text, "manifest.json"); },
                ThrowsMessage<Error>(AllOf(HasSubstr("manifest.json"), HasSubstr("nested"))));
}

TEST(Manifest, TextThatIsNotUtf8IsRefusedWhenWritten) {
  Manifest manifest = small_manifest();
  manifest.schedule = "\xFF";
  EXPECT_THAT([&] { to_json(manifest); }, ThrowsMessage<UsageError>(HasSubstr("UTF-8")));
  RankRecord record = small_record();
  record.data_position = "\xFF";
  EXPECT_THAT([&] { to_json(record); }, ThrowsMessage<UsageError>(HasSubstr("UTF-8")));
}

// Written by an earlier build; a fuzzer that begins with texts that are refused finds little.
TEST(Manifest, SeedsOfItsFuzzerAreAccepted) {
  const std::string folder = concat(FSDP_FUZZ_SEEDS, "/manifest/");
  for (const char* name : {"empty_manifest.json", "manifest.json"})
    EXPECT_NO_THROW(parse_manifest(read_text_file(folder + name, 1 << 20), name));
  for (const char* name : {"empty_rank.json", "rank.json"})
    EXPECT_NO_THROW(parse_rank_record(read_text_file(folder + name, 1 << 20), name));
}

TEST(RankRecord, BlocksTogetherHaveTheChecksumOfTheFile) {
  const std::string_view bytes = "ten bytes, then ten, then five";
  const auto crc_of = [](std::string_view part) { return crc32c(std::as_bytes(std::span(part))); };
  for (const size_t block : {1, 7, 10, 30, 100}) {
    RankRecord::File file;
    file.bytes = static_cast<int64_t>(bytes.size());
    for (size_t begin = 0; begin < bytes.size(); begin += block)
      file.blocks.push_back(crc_of(bytes.substr(begin, block)));
    EXPECT_EQ(crc32c_of(file, static_cast<int64_t>(block)), crc_of(bytes));
  }
}

TEST(Manifest, TheDocumentationHasTheVersionThatIsWritten) {
  const std::string page = read_text_file(FSDP_DOCS "/checkpoints.md", 1 << 20);
  EXPECT_THAT(page, HasSubstr(concat("| ", kCheckpointVersion, ", which is written |")));
  EXPECT_THAT(page, HasSubstr(concat("`version` (", kCheckpointVersion, "; readers refuse")));
}

// --- base64 --------------------------------------------------------------------------------------

// RFC 4648, section 10.
TEST(Base64, WritesThePublishedExamples) {
  const std::pair<const char*, const char*> examples[] = {{"", ""},
                                                          {"f", "Zg=="},
                                                          {"fo", "Zm8="},
                                                          {"foo", "Zm9v"},
                                                          {"foob", "Zm9vYg=="},
                                                          {"fooba", "Zm9vYmE="},
                                                          {"foobar", "Zm9vYmFy"}};
  for (const auto& [bytes, text] : examples) {
    EXPECT_EQ(base64(bytes), text);
    EXPECT_EQ(from_base64(text), bytes);
  }
}

TEST(Base64, RefusesWhatItDoesNotWrite) {
  for (const std::string text : {"A", "AA", "AAA", "AAAAA", "====", "A===", "AA=A", "A=A=", "=AAA",
                                 "AA==AAAA", "AAA=AAAA", "AA\nA", "AA A", "AA-A", "AA_A",
                                 "\xC3\xA9"
                                 "AA",
                                 "AAAA\n"})
    EXPECT_EQ(from_base64(text), std::nullopt) << text;
  EXPECT_EQ(from_base64(std::string("AA\0A", 4)), std::nullopt);
  // Bits that belong to no byte.
  EXPECT_EQ(from_base64("Zh=="), std::nullopt);
  EXPECT_EQ(from_base64("Zm9="), std::nullopt);
}

}  // namespace
}  // namespace fsdp::manifest_test
