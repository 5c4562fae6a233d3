// The safetensors header: read back as written, and every defect has its own message.
#include "fsdp/checkpoint/format/safetensors_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"

namespace fsdp::safetensors_file_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

SafetensorsHeader parse(const std::string& json, int64_t data_bytes) {
  return parse_safetensors_header(json, 8 + static_cast<int64_t>(json.size()) + data_bytes,
                                  "model.safetensors");
}

template <typename Matcher>
void expect_error(const std::string& json, int64_t data_bytes, const Matcher& words) {
  EXPECT_THAT([&] { parse(json, data_bytes); },
              ThrowsMessage<Error>(AllOf(HasSubstr("model.safetensors"), words)))
      << json;
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return concat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
                ",\"data_offsets\":", offsets, "}");
}

TEST(SafetensorsHeader, ReadsWhatItWrites) {
  SafetensorsHeader header;
  int64_t data_bytes = 0;
  for (const DType dtype : all_dtypes()) {
    header.tensors.push_back(
        {.name = concat("blocks.3.", name_of(dtype)), .dtype = dtype, .shape = {3, 5}});
    data_bytes += 15 * element_bytes(dtype);
  }
  header.tensors.push_back({.name = "scalar", .dtype = DType::kFloat32, .shape = {}});
  header.tensors.push_back({.name = "empty", .dtype = DType::kFloat32, .shape = {4, 0}});
  header.tensors.push_back(
      {.name = "quote \" and \\ and \u00fc", .dtype = DType::kUInt8, .shape = {1}});
  data_bytes += 4 + 1;
  header.metadata = {{"format", "pt"},
                     {"DCP_SHARDING_INFO", "{\"a\": {\"saved_offsets\": [1, 0]}}"}};
  const std::string bytes = write_safetensors_header(header);
  EXPECT_EQ(bytes.size() % 128, 0u);
  EXPECT_EQ(static_cast<int64_t>(bytes.size()), header.data_begin);
  const auto file_bytes = static_cast<int64_t>(bytes.size()) + data_bytes;
  const int64_t length = safetensors_header_bytes(bytes.substr(0, 8), file_bytes, "file");
  EXPECT_EQ(length, static_cast<int64_t>(bytes.size()) - 8);
  EXPECT_EQ(parse_safetensors_header(bytes.substr(8), file_bytes, "file"), header);
}

// Steps that look at every pair of 40000 experts' matrices would take minutes, and meet ctest's
// limit.
TEST(SafetensorsHeader, KeepsTheNamesOfFortyThousandTensors) {
  constexpr int64_t kTensors = 40'000;
  SafetensorsHeader header;
  for (int64_t i = 0; i < kTensors; ++i)
    header.tensors.push_back(
        {.name = concat("experts.", i, ".weight"), .dtype = DType::kFloat32, .shape = {2, 3}});
  const std::string bytes = write_safetensors_header(header);
  const auto file_bytes = static_cast<int64_t>(bytes.size()) + kTensors * 24;
  EXPECT_EQ(parse_safetensors_header(bytes.substr(8), file_bytes, "file"), header);
}

// https://github.com/huggingface/safetensors describes the layout.
TEST(SafetensorsHeader, ReadsTensorsInTheOrderOfTheirData) {
  const SafetensorsHeader header = parse(
      concat("{", tensor("b", "F32", "[2]", "[4,12]"), ",", tensor("a", "BF16", "[2,1]", "[0,4]"),
             ",\"__metadata__\":{\"format\":\"pt\"}}   "),
      12);
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[0].dtype, DType::kBFloat16);
  EXPECT_EQ(header.tensors[1].shape, std::vector<int64_t>{2});
  EXPECT_EQ(header.metadata.at("format"), "pt");
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
}

TEST(SafetensorsHeader, LengthThatCannotBeIsRefused) {
  const auto length_of = [](const std::string& bytes, int64_t file_bytes) {
    return safetensors_header_bytes(bytes, file_bytes, "model.safetensors");
  };
  const auto refuses = [](const char* words) { return ThrowsMessage<Error>(HasSubstr(words)); };
  EXPECT_THAT([&] { length_of("\x02\0\0", 3); }, refuses("has 3 bytes"));
  EXPECT_THAT([&] { length_of(std::string("\x09\0\0\0\0\0\0\0", 8), 16); }, refuses("truncated"));
  EXPECT_THAT([&] { length_of(std::string(8, '\xFF'), 1000); }, refuses("18446744073709551615"));
  EXPECT_EQ(length_of(std::string("\x08\0\0\0\0\0\0\0", 8), 16), 8);
}

TEST(SafetensorsHeader, EveryDefectHasItsWords) {
  const std::string good = tensor("w", "F32", "[2]", "[0,8]");
  expect_error("", 0, HasSubstr("does not begin with '{'"));
  expect_error(" {}", 0, HasSubstr("does not begin with '{'"));
  expect_error("{\"w\":", 0, HasSubstr("not valid JSON"));
  expect_error("{} x", 0, HasSubstr("not valid JSON"));
  // Some parsers take a zero byte for the end, and would not see what follows.
  expect_error(std::string("{}\0{}", 5), 0, HasSubstr("not valid JSON"));
  expect_error(std::string("{}\0", 3), 0, HasSubstr("not valid JSON"));
  expect_error(concat("{", good, ",", good, "}"), 8, HasSubstr("'w' twice"));
  expect_error("{\"w\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
               8, HasSubstr("'dtype' twice"));
  expect_error("{\"w\":7}", 0, HasSubstr("no JSON object"));
  expect_error("{\"w\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, HasSubstr("has no dtype"));
  expect_error("{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, HasSubstr("has no shape"));
  expect_error("{\"w\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, HasSubstr("has no data_offsets"));
  expect_error("{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8,
               HasSubstr("the field 'x'"));
  expect_error(concat("{", tensor("w", "F31", "[2]", "[0,8]"), "}"), 8, HasSubstr("dtype F31"));
  expect_error("{\"w\":{\"dtype\":5,\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
               HasSubstr("dtype that is no text"));
  expect_error(concat("{", tensor("w", "F32", "2", "[0,8]"), "}"), 8,
               HasSubstr("shape that is no list"));
  for (const char* size : {"-2", "2.0", "\"2\"", "18446744073709551615"})
    expect_error(concat("{", tensor("w", "F32", concat("[", size, "]"), "[0,8]"), "}"), 8,
                 HasSubstr("whole numbers from 0 up"));
  expect_error(concat("{", tensor("w", "F32", "[2]", "[0,8,9]"), "}"), 8,
               HasSubstr("3 data_offsets"));
  expect_error(concat("{", tensor("w", "F32", "[2]", "[8,0]"), "}"), 8,
               HasSubstr("before it begins"));
  expect_error(concat("{", tensor("w", "F32", "[3]", "[0,8]"), "}"), 8, HasSubstr("need 12"));
  expect_error(concat("{", tensor("w", "F32", "[4611686018427387904,4]", "[0,8]"), "}"), 8,
               HasSubstr("more bytes than can be counted"));
  expect_error(concat("{", good, "}"), 7, HasSubstr("truncated"));
  expect_error(concat("{", good, "}"), 9, HasSubstr("1 bytes after the last tensor"));
  expect_error(concat("{", good, ",", tensor("v", "F32", "[2]", "[4,12]"), "}"), 12,
               HasSubstr("inside the tensor before it"));
  expect_error(concat("{", good, ",", tensor("v", "F32", "[1]", "[12,16]"), "}"), 16,
               HasSubstr("bytes 8 to 12 before tensor 'v'"));
  expect_error("{\"__metadata__\":[]}", 0, HasSubstr("__metadata__ is not"));
  expect_error("{\"__metadata__\":{\"a\":1}}", 0, HasSubstr("'a' in __metadata__"));
}

TEST(SafetensorsHeader, AnEmptyTensorMayHaveAnyOtherSize) {
  EXPECT_EQ(parse(concat("{", tensor("w", "F32", "[4611686018427387904,4,0]", "[0,0]"), "}"), 0)
                .tensors.front()
                .shape.back(),
            0);
}

// The last 8 bytes of a seed are not the file's: twice the length of its data, as a big number.
TEST(SafetensorsHeader, SeedsOfItsFuzzerAreAccepted) {
  for (const char* name :
       {"empty.bin", "one_tensor.bin", "every_dtype.bin", "piece_of_a_checkpoint.bin"}) {
    std::string bytes =
        read_text_file(concat(FSDP_FUZZ_SEEDS, "/safetensors_header/", name), 1 << 20);
    int64_t twice = 0;
    for (const char byte : bytes.substr(bytes.size() - 8))
      twice = twice << 8 | static_cast<unsigned char>(byte);
    bytes.resize(bytes.size() - 8);
    const auto file_bytes = static_cast<int64_t>(bytes.size()) + twice / 2;
    EXPECT_EQ(safetensors_header_bytes(bytes.substr(0, 8), file_bytes, name),
              static_cast<int64_t>(bytes.size()) - 8);
    EXPECT_NO_THROW(parse_safetensors_header(bytes.substr(8), file_bytes, name));
  }
}

TEST(SafetensorsHeader, NamesThatCannotBeWrittenAreRefused) {
  const auto write = [](std::vector<SafetensorsEntry> tensors) {
    SafetensorsHeader header;
    header.tensors = std::move(tensors);
    return write_safetensors_header(header);
  };
  const SafetensorsEntry one{.name = "w", .dtype = DType::kFloat32, .shape = {1}};
  EXPECT_THAT([&] { write({one, one}); }, ThrowsMessage<UsageError>(HasSubstr("'w'")));
  EXPECT_THAT([&] { write({{.name = "__metadata__", .dtype = DType::kFloat32, .shape = {1}}}); },
              ThrowsMessage<UsageError>(HasSubstr("__metadata__")));
  EXPECT_THAT([&] { write({{.name = "\xFF", .dtype = DType::kFloat32, .shape = {1}}}); },
              ThrowsMessage<UsageError>(HasSubstr("UTF-8")));
}

}  // namespace
}  // namespace fsdp::safetensors_file_test
