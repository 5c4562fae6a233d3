// The tokenizer that is built in: a token is a byte, and one more ends a document.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fsdp {

struct TokenHeader;

inline constexpr const char* kByteTokenizerName = "bytes";
inline constexpr int64_t kByteVocabulary = 257;
inline constexpr int64_t kByteEndOfDocument = 256;

// One token for each byte, into a span as long as the text. Any bytes are text.
void encode_bytes(std::string_view text, std::span<uint16_t> tokens);
void encode_bytes(std::string_view text, std::span<int64_t> tokens);

// The bytes as they were, whether they are valid UTF-8 or not; the end of a document has none. A
// token that is none of the 257 is an Error.
std::string decode_bytes(std::span<const int64_t> tokens);

// What a file of such tokens says of itself, without its counts.
TokenHeader byte_level_header();

}  // namespace fsdp
