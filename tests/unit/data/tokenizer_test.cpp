// Bytes to tokens and back.
#include "fsdp/data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/data/token_file.h"

namespace fsdp::tokenizer_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(ByteTokenizer, EveryByteGoesThereAndBack) {
  std::string text;
  for (int i = 0; i < 512; ++i) text.push_back(static_cast<char>(i % 256));
  const auto bytes = open_tokenizer(kByteTokenizerName);
  const std::vector<int64_t> tokens = bytes->encode_prompt(text);
  ASSERT_EQ(tokens.size(), text.size());
  for (size_t i = 0; i < tokens.size(); ++i) EXPECT_EQ(tokens[i], static_cast<int64_t>(i % 256));
  EXPECT_EQ(bytes->next_text(tokens), text);
  EXPECT_EQ(bytes->next_text({}), "");
  EXPECT_EQ(bytes->next_text(std::vector<int64_t>{'a', kByteEndOfDocument, 'b'}), "ab");
}

TEST(ByteTokenizer, TokensThatAreNoBytesAreRefused) {
  const auto bytes = open_tokenizer(kByteTokenizerName);
  for (const int64_t token : {int64_t{-1}, int64_t{257}, INT64_MAX, INT64_MIN})
    EXPECT_THAT(
        [&] {
          bytes->next_text(std::vector<int64_t>({65, token}));
        },
        ThrowsMessage<Error>(HasSubstr("token " + std::to_string(token) + " is no byte")));
}

TEST(ByteTokenizer, ItsFilesSayWhatTheTokensAre) {
  const TokenHeader header = open_tokenizer(kByteTokenizerName)->kind();
  EXPECT_EQ(header.vocabulary, 257);
  EXPECT_EQ(header.token_bytes, 2);
  EXPECT_EQ(header.end_of_document, 256);
  EXPECT_EQ(header.tokenizer, "bytes");
}

}  // namespace
}  // namespace fsdp::tokenizer_test
