#include "fsdp/data/token_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/integer.h"

namespace fsdp {
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
