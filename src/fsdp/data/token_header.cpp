#include "fsdp/data/token_header.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::string_view kMagic = "fsdptok\n";
constexpr uint32_t kPlainVersion = 1;
constexpr uint32_t kMaskedVersion = 2;  // with a loss mask
// Most programs keep token ids in 32 bits.
constexpr int64_t kMaxVocabulary = int64_t{1} << 31;
constexpr const char* kRemedy = "use another copy, or pack the text again";

// Where each field lies.
constexpr size_t kVersionAt = 8;
constexpr size_t kTokenBytesAt = 12;
constexpr size_t kVocabularyAt = 16;
constexpr size_t kNumTokensAt = 24;
constexpr size_t kNumDocumentsAt = 32;
constexpr size_t kEndOfDocumentAt = 40;  // all bits set: there is none
constexpr size_t kTokenizerAt = 48;
constexpr size_t kTokenizerBytes = 64;  // zeros after the name
constexpr size_t kDataCrcAt = 112;
constexpr size_t kNumLearntAt = 116;  // without a mask: 8 zero bytes
constexpr size_t kHeaderCrcAt = 124;

template <typename Value>
Value value_at(std::span<const std::byte> bytes, size_t place) {
  Value value{};
  std::memcpy(&value, bytes.data() + place, sizeof value);
  return value;
}

template <typename Value>
void put(TokenHeaderBytes& bytes, size_t place, Value value) {
  std::memcpy(bytes.data() + place, &value, sizeof value);
}

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= kTokenizerBytes &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

std::string tokenizer_in(std::span<const std::byte> bytes, const std::string& source) {
  const auto* const begin = reinterpret_cast<const char*>(bytes.data()) + kTokenizerAt;
  const std::string_view field(begin, kTokenizerBytes);
  const std::string_view name = field.substr(0, field.find('\0'));
  const bool padded = std::all_of(field.begin() + static_cast<std::ptrdiff_t>(name.size()),
                                  field.end(), [](char c) { return c == '\0'; });
  FSDP_CHECK(padded && is_name(name), source,
             ": the tokenizer's name is not 1 to 64 printable characters and then zeros; ",
             kRemedy);
  return std::string(name);
}

// Checks what must be true of every header, of one that was read and of one to be written.
void check(const TokenHeader& header, const std::string& source) {
  FSDP_CHECK(header.token_bytes == 2 || header.token_bytes == 4, source, ": a token has ",
             header.token_bytes, " bytes where it must have 2 or 4; ", kRemedy);
  const int64_t two_bytes = header.has_mask() ? not_learnt_bit(2) : int64_t{1} << 16;
  const int64_t limit = header.token_bytes == 2 ? two_bytes : kMaxVocabulary;
  FSDP_CHECK(header.vocabulary >= 1 && header.vocabulary <= limit, source, ": the vocabulary is ",
             header.vocabulary, " where tokens of ", header.token_bytes, " bytes",
             header.has_mask() ? " with a loss mask" : "", " allow 1 to ", limit, "; ", kRemedy);
  constexpr int64_t kMaxTokens = (INT64_MAX - kTokenHeaderBytes) / 4;
  FSDP_CHECK(header.num_tokens >= 0 && header.num_tokens <= kMaxTokens, source,
             ": its header counts ", header.num_tokens, " tokens, more than a file can hold; ",
             kRemedy);
  FSDP_CHECK(header.num_documents >= 0 && header.num_documents <= header.num_tokens, source,
             ": its header counts ", header.num_documents, " documents in ", header.num_tokens,
             " tokens; ", kRemedy);
  const int64_t num_learnt = header.num_learnt.value_or(0);
  FSDP_CHECK(num_learnt >= 0 && num_learnt <= header.num_tokens, source, ": its header counts ",
             num_learnt, " tokens that are learnt of ", header.num_tokens, "; ", kRemedy);
  FSDP_CHECK(!header.end_of_document ||
                 (*header.end_of_document >= 0 && *header.end_of_document < header.vocabulary),
             source, ": the token that ends documents is ", header.end_of_document.value_or(-1),
             ", outside the vocabulary of ", header.vocabulary, "; ", kRemedy);
  FSDP_CHECK(is_name(header.tokenizer), source, ": the tokenizer's name is '", header.tokenizer,
             "'; it must be 1 to 64 printable ASCII characters");
}

void check_length(const TokenHeader& header, int64_t file_bytes, const std::string& source) {
  const int64_t expected = kTokenHeaderBytes + header.data_bytes();
  FSDP_CHECK(file_bytes == expected, source, ": has ", file_bytes, " bytes where its header says ",
             expected, ": it ", file_bytes < expected ? "was cut short" : "has more than it should",
             "; ", kRemedy);
}

std::string kind_text(const TokenHeader& header) {
  return concat("tokenizer '", header.tokenizer, "', vocabulary ", header.vocabulary, ", ",
                header.token_bytes, " bytes per token, end of document ",
                header.end_of_document ? concat(*header.end_of_document) : "none");
}

}  // namespace

int64_t token_bytes_for(int64_t vocabulary) { return vocabulary <= int64_t{1} << 16 ? 2 : 4; }

int64_t masked_token_bytes_for(int64_t vocabulary) {
  return vocabulary <= not_learnt_bit(2) ? 2 : 4;
}

bool begins_like_token_file(std::span<const std::byte> first) {
  return first.size() >= kMagic.size() &&
         std::memcmp(first.data(), kMagic.data(), kMagic.size()) == 0;
}

TokenHeader parse_token_header(std::span<const std::byte> first, int64_t file_bytes,
                               const std::string& source) {
  FSDP_CHECK(begins_like_token_file(first), source,
             ": does not begin as a packed token file does; make one with fsdp data pack, and give "
             "a text file another name than .bin");
  FSDP_CHECK(static_cast<int64_t>(first.size()) >= kTokenHeaderBytes, source, ": has ", file_bytes,
             " bytes where a header alone has ", kTokenHeaderBytes, ": it was cut short; ",
             kRemedy);
  const auto version = value_at<uint32_t>(first, kVersionAt);
  FSDP_CHECK(version == kPlainVersion || version == kMaskedVersion, source, ": its version is ",
             version, " where this program reads ", kPlainVersion, " and ", kMaskedVersion,
             "; use a newer fsdp, or pack the text again");
  const auto bytes = first.first(kTokenHeaderBytes);
  FSDP_CHECK(crc32c(bytes.first(kHeaderCrcAt)) == value_at<uint32_t>(bytes, kHeaderCrcAt), source,
             ": its header is damaged (the checksum differs); ", kRemedy);
  const auto num_learnt = value_at<int64_t>(bytes, kNumLearntAt);
  FSDP_CHECK(
      version == kMaskedVersion || num_learnt == 0, source,
      ": its header says something where it must be zero; use a newer fsdp, or pack the text "
      "again");
  TokenHeader header;
  header.token_bytes = value_at<uint32_t>(bytes, kTokenBytesAt);
  header.vocabulary = value_at<int64_t>(bytes, kVocabularyAt);
  header.num_tokens = value_at<int64_t>(bytes, kNumTokensAt);
  header.num_documents = value_at<int64_t>(bytes, kNumDocumentsAt);
  const auto end_of_document = value_at<int64_t>(bytes, kEndOfDocumentAt);
  if (end_of_document != -1) header.end_of_document = end_of_document;
  header.tokenizer = tokenizer_in(bytes, source);
  header.data_crc32c = value_at<uint32_t>(bytes, kDataCrcAt);
  if (version == kMaskedVersion) header.num_learnt = num_learnt;
  check(header, source);
  check_length(header, file_bytes, source);
  return header;
}

TokenHeaderBytes write_token_header(const TokenHeader& header) {
  check(header, "token file");
  TokenHeaderBytes bytes{};
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  put(bytes, kVersionAt, header.has_mask() ? kMaskedVersion : kPlainVersion);
  put(bytes, kTokenBytesAt, static_cast<uint32_t>(header.token_bytes));
  put(bytes, kVocabularyAt, header.vocabulary);
  put(bytes, kNumTokensAt, header.num_tokens);
  put(bytes, kNumDocumentsAt, header.num_documents);
  put(bytes, kEndOfDocumentAt, header.end_of_document.value_or(-1));
  std::memcpy(bytes.data() + kTokenizerAt, header.tokenizer.data(), header.tokenizer.size());
  put(bytes, kDataCrcAt, header.data_crc32c);
  put(bytes, kNumLearntAt, header.num_learnt.value_or(0));
  put(bytes, kHeaderCrcAt, crc32c(std::span(bytes).first(kHeaderCrcAt)));
  return bytes;
}

uint64_t fingerprint_of(const TokenHeader& header) {
  // The name's checksum, since hashes of the standard library differ between machines.
  const uint32_t name = crc32c(std::as_bytes(std::span(header.tokenizer)));
  uint64_t bits = mixed_bits(uint64_t{header.data_crc32c} << 32 | name);
  bits = mixed_bits(bits ^ static_cast<uint64_t>(header.num_tokens));
  return mixed_bits(bits ^ static_cast<uint64_t>(header.vocabulary));
}

std::string fingerprint_text(uint64_t fingerprint) {
  char text[19];
  std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(fingerprint));
  return text;
}

void check_same_kind(const TokenHeader& first, const std::string& first_path,
                     const TokenHeader& other, const std::string& other_path) {
  FSDP_CHECK(other.tokenizer == first.tokenizer && other.vocabulary == first.vocabulary &&
                 other.token_bytes == first.token_bytes &&
                 other.end_of_document == first.end_of_document,
             other_path, ": has other tokens (", kind_text(other), ") than ", first_path, " (",
             kind_text(first), "); pack all the text with one tokenizer, or name fewer files");
}

}  // namespace fsdp
