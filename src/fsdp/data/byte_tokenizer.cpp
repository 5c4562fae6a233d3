#include "fsdp/data/byte_tokenizer.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/data/token_header.h"

namespace fsdp {
namespace {

template <typename Token>
void encode(std::string_view text, std::span<Token> tokens) {
  FSDP_ASSERT(text.size() == tokens.size(), tokens.size(), " tokens for ", text.size(), " bytes");
  std::transform(text.begin(), text.end(), tokens.begin(),
                 [](char byte) { return static_cast<Token>(static_cast<unsigned char>(byte)); });
}

}  // namespace

void encode_bytes(std::string_view text, std::span<uint16_t> tokens) { encode(text, tokens); }
void encode_bytes(std::string_view text, std::span<int64_t> tokens) { encode(text, tokens); }

std::string decode_bytes(std::span<const int64_t> tokens) {
  std::string text;
  text.reserve(tokens.size());
  for (const int64_t token : tokens) {
    FSDP_CHECK(token >= 0 && token < kByteVocabulary, "token ", token,
               " is no byte: byte-level tokens are 0 to 255, and 256 ends a document; decode with "
               "the tokenizer that the model was trained with");
    if (token != kByteEndOfDocument) text.push_back(static_cast<char>(token));
  }
  return text;
}

TokenHeader byte_level_header() {
  TokenHeader header;
  header.token_bytes = token_bytes_for(kByteVocabulary);
  header.vocabulary = kByteVocabulary;
  header.end_of_document = kByteEndOfDocument;
  header.tokenizer = kByteTokenizerName;
  return header;
}

}  // namespace fsdp
