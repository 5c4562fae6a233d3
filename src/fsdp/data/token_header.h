// The first 128 bytes of a packed token file: what the tokens after them are (docs/data.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace fsdp {

inline constexpr int64_t kTokenHeaderBytes = 128;

using TokenHeaderBytes = std::array<std::byte, kTokenHeaderBytes>;

struct TokenHeader {
  int64_t token_bytes = 2;                 // of one token: 2 or 4
  int64_t vocabulary = 0;                  // tokens are 0 to vocabulary - 1
  int64_t num_tokens = 0;                  // ends of documents included
  int64_t num_documents = 0;               // at most one per token
  std::optional<int64_t> end_of_document;  // the token after each document, if there is one
  std::string tokenizer;                   // its name: 1 to 64 printable ASCII characters
  uint32_t data_crc32c = 0;                // of all bytes after the header
  // Tokens that are learnt as targets, of a file with a loss mask; without one all of them are.
  std::optional<int64_t> num_learnt = {};

  bool has_mask() const { return num_learnt.has_value(); }
  int64_t data_bytes() const { return num_tokens * token_bytes; }
  bool operator==(const TokenHeader&) const = default;
};

// The narrower width that holds every token of a vocabulary; in a file with a loss mask the highest
// bit is not the token's.
int64_t token_bytes_for(int64_t vocabulary);
int64_t masked_token_bytes_for(int64_t vocabulary);

// The bit of a stored token that says, in a file with a loss mask, that it is not learnt.
constexpr int64_t not_learnt_bit(int64_t token_bytes) {
  return int64_t{1} << (8 * token_bytes - 1);
}

// Reads a header and checks it and the file's length against each other. `first` are the first
// bytes of the file, as many as there are up to 128. Error that begins with `source`.
TokenHeader parse_token_header(std::span<const std::byte> first, int64_t file_bytes,
                               const std::string& source);

// An Error for what no reader would accept.
TokenHeaderBytes write_token_header(const TokenHeader& header);

// Says which tokens these are: equal for the same tokens of the same tokenizer, whatever files they
// are in and whether they were packed or not.
uint64_t fingerprint_of(const TokenHeader& header);

// "0x0123456789abcdef"
std::string fingerprint_text(uint64_t fingerprint);

// Error where tokens of two files are not of one kind and so cannot follow each other.
void check_same_kind(const TokenHeader& first, const std::string& first_path,
                     const TokenHeader& other, const std::string& other_path);

// Whether a file that begins with these bytes was meant to be a token file.
bool begins_like_token_file(std::span<const std::byte> first);

}  // namespace fsdp
