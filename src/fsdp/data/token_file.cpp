#include "fsdp/data/token_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {

// --- the header ----------------------------------------------------------------------------------

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

// --- stored tokens -------------------------------------------------------------------------------

namespace {

template <typename Stored>
int64_t widen(const std::byte* stored, std::span<int64_t> into) {
  Stored largest = 0;
  for (int64_t& token : into) {
    Stored value = 0;
    std::memcpy(&value, stored, sizeof value);
    stored += sizeof value;
    token = value;
    largest = std::max(largest, value);
  }
  return largest;
}

template <typename Stored>
void narrow(std::span<const int64_t> tokens, int64_t mask, std::string& stored) {
  const size_t before = stored.size();
  stored.resize(before + tokens.size() * sizeof(Stored));
  char* out = stored.data() + before;
  for (const int64_t token : tokens) {
    const auto value = static_cast<Stored>(token | mask);
    std::memcpy(out, &value, sizeof value);
    out += sizeof value;
  }
}

const std::byte* map_file(const FileReader& reader) {
  void* const mapped = ::mmap(nullptr, static_cast<size_t>(reader.bytes()), PROT_READ, MAP_SHARED,
                              reader.descriptor(), 0);
  FSDP_CHECK(mapped != MAP_FAILED, reader.path(),
             ": cannot be mapped to memory: ", std::generic_category().message(errno),
             "; raise the limit for address space (ulimit -v), or copy it to a local disk");
  return static_cast<const std::byte*>(mapped);
}

[[noreturn]] void refuse_token(const std::string& path, int64_t place, int64_t token,
                               int64_t vocabulary) {
  throw Error(concat(path, ": token number ", place, " is ", token, ", outside the vocabulary of ",
                     vocabulary,
                     " that the header names: one of them is wrong; use another copy, or pack the "
                     "text again"));
}

void check_tokens(std::span<const int64_t> tokens, int64_t first, const TokenHeader& header,
                  const std::string& path) {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= header.vocabulary)
      refuse_token(path, first + static_cast<int64_t>(i), tokens[i], header.vocabulary);
}

}  // namespace

int64_t widen_tokens(std::span<const std::byte> stored, int64_t token_bytes, int64_t first,
                     std::span<int64_t> into) {
  FSDP_ASSERT(first >= 0 && (first + static_cast<int64_t>(into.size())) * token_bytes <=
                                static_cast<int64_t>(stored.size()),
              "tokens ", first, " to ", first + static_cast<int64_t>(into.size()));
  const std::byte* const begin = stored.data() + first * token_bytes;
  return token_bytes == 2 ? widen<uint16_t>(begin, into) : widen<uint32_t>(begin, into);
}

void append_stored(std::span<const int64_t> tokens, Learnt learnt, int64_t token_bytes,
                   std::string& stored) {
  const int64_t mask = learnt == Learnt::kYes ? 0 : not_learnt_bit(token_bytes);
  if (token_bytes == 2)
    narrow<uint16_t>(tokens, mask, stored);
  else
    narrow<uint32_t>(tokens, mask, stored);
}

int64_t take_mask(std::span<int64_t> tokens, int64_t token_bytes, std::span<uint8_t> learnt) {
  FSDP_ASSERT(learnt.empty() || learnt.size() == tokens.size(), learnt.size());
  const int64_t bit = not_learnt_bit(token_bytes);
  int64_t largest = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!learnt.empty()) learnt[i] = (tokens[i] & bit) == 0 ? 1 : 0;
    tokens[i] &= bit - 1;
    largest = std::max(largest, tokens[i]);
  }
  return largest;
}

// --- reading -------------------------------------------------------------------------------------

TokenFile::TokenFile(std::string path) : path_(std::move(path)) {
  const FileReader reader(path_);
  std::vector<std::byte> first(static_cast<size_t>(std::min(reader.bytes(), kTokenHeaderBytes)));
  reader.read(0, first);
  header_ = parse_token_header(first, reader.bytes(), path_);
  mapped_ = map_file(reader);
}

TokenFile::TokenFile(TokenFile&& other) noexcept
    : path_(std::move(other.path_)),
      header_(std::move(other.header_)),
      mapped_(std::exchange(other.mapped_, nullptr)) {}

TokenFile::~TokenFile() {
  if (mapped_ != nullptr) ::munmap(const_cast<std::byte*>(mapped_), static_cast<size_t>(bytes()));
}

std::span<const std::byte> TokenFile::data() const {
  return {mapped_ + kTokenHeaderBytes, static_cast<size_t>(header_.data_bytes())};
}

void TokenFile::read(int64_t first, std::span<int64_t> into, std::span<uint8_t> learnt) const {
  int64_t largest = widen_tokens(data(), header_.token_bytes, first, into);
  if (header_.has_mask())
    largest = take_mask(into, header_.token_bytes, learnt);
  else
    std::fill(learnt.begin(), learnt.end(), uint8_t{1});
  if (largest >= header_.vocabulary) check_tokens(into, first, header_, path_);
}

void TokenFile::look_over(int64_t max_bytes) const {
  constexpr int64_t kPieceTokens = int64_t{1} << 16;
  const int64_t all_pieces = (header_.num_tokens + kPieceTokens - 1) / kPieceTokens;
  const int64_t piece_bytes = kPieceTokens * header_.token_bytes;
  const int64_t num_pieces = std::min(all_pieces, (max_bytes + piece_bytes - 1) / piece_bytes);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < num_pieces; ++i) {
    const int64_t first = checked_mul(i, all_pieces) / num_pieces * kPieceTokens;
    tokens.resize(static_cast<size_t>(std::min(kPieceTokens, header_.num_tokens - first)));
    read(first, tokens);
  }
}

void TokenFile::verify(const std::function<void(int64_t)>& progress) const {
  constexpr int64_t kPieceTokens = int64_t{1} << 18;
  std::vector<int64_t> tokens;
  std::vector<uint8_t> learnt;
  int64_t num_learnt = 0;
  uint32_t checksum = 0;
  for (int64_t first = 0; first < header_.num_tokens; first += kPieceTokens) {
    const int64_t count = std::min(kPieceTokens, header_.num_tokens - first);
    tokens.resize(static_cast<size_t>(count));
    learnt.resize(tokens.size());
    read(first, tokens, learnt);
    num_learnt += std::count(learnt.begin(), learnt.end(), uint8_t{1});
    checksum = crc32c(data().subspan(static_cast<size_t>(first * header_.token_bytes),
                                     static_cast<size_t>(count * header_.token_bytes)),
                      checksum);
    if (progress) progress((first + count) * header_.token_bytes);
  }
  FSDP_CHECK(checksum == header_.data_crc32c, path_,
             ": its tokens are damaged (the checksum differs); use another copy, or pack the text "
             "again");
  FSDP_CHECK(num_learnt == header_.num_learnt.value_or(header_.num_tokens), path_, ": ", num_learnt,
             " of its tokens are learnt where its header says ", header_.num_learnt.value_or(0),
             "; pack the text again");
}

// --- writing -------------------------------------------------------------------------------------

TokenFileWriter::TokenFileWriter(std::string path, TokenHeader header)
    : path_(std::move(path)),
      temporary_(temporary_name_for(path_)),
      file_(temporary_),
      header_(std::move(header)) {
  header_.num_tokens = 0;
  header_.num_documents = 0;
  header_.data_crc32c = 0;
  if (header_.has_mask()) header_.num_learnt = 0;
  // Refuses a bad header now, not hours later in commit().
  file_.write(write_token_header(header_));
}

void TokenFileWriter::write(std::span<const int64_t> tokens, Learnt learnt) {
  FSDP_ASSERT(learnt == Learnt::kYes || header_.has_mask(), path_, " has no loss mask");
  check_tokens(tokens, header_.num_tokens, header_, path_);
  stored_.clear();
  append_stored(tokens, learnt, header_.token_bytes, stored_);
  write_stored(std::as_bytes(std::span(stored_)));
}

void TokenFileWriter::write_stored(std::span<const std::byte> tokens) {
  FSDP_ASSERT(tokens.size() % static_cast<size_t>(header_.token_bytes) == 0, tokens.size());
  file_.write(tokens);
  header_.data_crc32c = crc32c(tokens, header_.data_crc32c);
  header_.num_tokens += static_cast<int64_t>(tokens.size()) / header_.token_bytes;
  if (!header_.has_mask()) return;
  const auto width = static_cast<size_t>(header_.token_bytes);
  for (size_t highest = width - 1; highest < tokens.size(); highest += width)
    *header_.num_learnt += (tokens[highest] & std::byte{0x80}) == std::byte{0} ? 1 : 0;
}

TokenHeader TokenFileWriter::commit() {
  file_.rewrite(0, write_token_header(header_));
  file_.commit();
  try {
    rename_durably(temporary_, path_);
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
  return header_;
}

}  // namespace fsdp
