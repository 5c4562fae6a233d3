// Packed token files: memory-mapped when they are read, complete or absent when they are written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "fsdp/base/durable_file.h"

namespace fsdp {

// --- the header ----------------------------------------------------------------------------------

// The first 128 bytes: what the tokens after them are (docs/data.md).
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

// --- files ---------------------------------------------------------------------------------------

// A file that is open and mapped: huge ones cost address space, and memory only where they are
// read. Any number of threads may read at a time. Nobody may change the file meanwhile.
class TokenFile {
 public:
  // Reads and checks the header and the file's length, not the tokens. Error that names the path.
  explicit TokenFile(std::string path);
  TokenFile(TokenFile&& other) noexcept;
  TokenFile& operator=(TokenFile&&) = delete;
  ~TokenFile();

  const std::string& path() const { return path_; }
  const TokenHeader& header() const { return header_; }
  int64_t bytes() const { return kTokenHeaderBytes + header_.data_bytes(); }

  // The tokens as they are stored.
  std::span<const std::byte> data() const;

  // Tokens from `first` on. One outside the vocabulary is an Error: a model that looked it up would
  // read beyond its embedding. `learnt`, if it is not empty, gets 1 for each token that is learnt
  // as a target, and 0 for each that is not.
  void read(int64_t first, std::span<int64_t> into, std::span<uint8_t> learnt = {}) const;

  // Reads about so many bytes of the tokens, evenly spread, and fails as read() does. So tokens
  // of another vocabulary than the header's are found before hours of training.
  void look_over(int64_t max_bytes) const;

  // Reads everything, and fails where the checksum or a token is wrong. `progress` is told how many
  // bytes are done, now and then.
  void verify(const std::function<void(int64_t)>& progress = {}) const;

 private:
  std::string path_;
  TokenHeader header_;
  const std::byte* mapped_ = nullptr;  // the whole file; null: moved from
};

enum class Learnt : uint8_t { kNo, kYes };

// Writes a new token file beside its path, under which it appears when it is committed; one that
// was there is replaced then. Not committed, it leaves nothing.
class TokenFileWriter {
 public:
  // Takes from `header`: vocabulary, token_bytes, end_of_document, tokenizer, and whether it
  // has_mask(). The rest is counted.
  TokenFileWriter(std::string path, TokenHeader header);
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  // Tokens of a document or of a part of it. One outside the vocabulary is an Error. Those that are
  // not learnt, such as a prompt's, need a header with a mask.
  void write(std::span<const int64_t> tokens, Learnt learnt = Learnt::kYes);
  // The same, as they are stored; the caller knows that they are in the vocabulary.
  void write_stored(std::span<const std::byte> tokens);

  // So many documents are complete.
  void count_documents(int64_t num_documents) { header_.num_documents += num_documents; }

  // Returns when the file survives a crash: what it says of itself.
  TokenHeader commit();

 private:
  std::string path_;
  std::string temporary_;
  FileWriter file_;
  TokenHeader header_;
  std::string stored_;  // a piece on its way to the file
};

// Appends tokens as files store them, of 2 or 4 bytes each; the caller knows that they fit.
void append_stored(std::span<const int64_t> tokens, Learnt learnt, int64_t token_bytes,
                   std::string& stored);

// Stored tokens of 2 or 4 bytes each, from `first` on, as numbers. Returns the largest.
int64_t widen_tokens(std::span<const std::byte> stored, int64_t token_bytes, int64_t first,
                     std::span<int64_t> into);

// Takes the bits of the loss mask out of stored tokens that were widened; see TokenFile::read().
// Returns the largest token that is left.
int64_t take_mask(std::span<int64_t> tokens, int64_t token_bytes, std::span<uint8_t> learnt);

}  // namespace fsdp
