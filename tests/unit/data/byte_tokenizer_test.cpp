// Bytes to tokens and back.
#include "fsdp/data/byte_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/data/token_header.h"

namespace fsdp::byte_tokenizer_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::string every_byte() {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
  return text;
}

TEST(ByteTokenizer, EveryByteGoesThereAndBack) {
  const std::string text = every_byte() + every_byte();
  std::vector<int64_t> wide(text.size());
  encode_bytes(text, wide);
  for (size_t i = 0; i < wide.size(); ++i) EXPECT_EQ(wide[i], static_cast<int64_t>(i % 256));
  EXPECT_EQ(decode_bytes(wide), text);
  std::vector<uint16_t> narrow(text.size());
  encode_bytes(text, narrow);
  EXPECT_TRUE(std::equal(wide.begin(), wide.end(), narrow.begin()));
  EXPECT_EQ(decode_bytes({}), "");
}

TEST(ByteTokenizer, TheEndOfADocumentHasNoBytes) {
  EXPECT_EQ(decode_bytes(std::vector<int64_t>{'a', kByteEndOfDocument, 'b'}), "ab");
}

TEST(ByteTokenizer, TokensThatAreNoBytesAreRefused) {
  for (const int64_t token : {int64_t{-1}, int64_t{257}, INT64_MAX, INT64_MIN})
    EXPECT_THAT(
        [&] {
          decode_bytes(std::vector<int64_t>{65, token});
        },
        ThrowsMessage<Error>(HasSubstr("token " + std::to_string(token) + " is no byte")));
}

TEST(ByteTokenizer, ItsFilesSayWhatTheTokensAre) {
  const TokenHeader header = byte_level_header();
  EXPECT_EQ(header.vocabulary, 257);
  EXPECT_EQ(header.token_bytes, 2);
  EXPECT_EQ(header.end_of_document, 256);
  EXPECT_EQ(header.tokenizer, "bytes");
}

}  // namespace
}  // namespace fsdp::byte_tokenizer_test
