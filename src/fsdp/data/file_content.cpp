#include "fsdp/data/file_content.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/base/utf8.h"

namespace fsdp {
namespace {

using namespace std::string_view_literals;

constexpr size_t kLookedAtBytes = 64 << 10;

struct Format {
  std::string_view magic;
  const char* name;
  const char* fix;
  size_t offset = 0;
};

constexpr const char* kTakeOut = "write its text to files first (docs/data.md shows how)";
constexpr const char* kUnpack = "unpack it first";
constexpr const char* kToText = "convert it to text first";
constexpr const char* kNoText = "name text instead";

// What people have beside their text. All but PDFs are known to be no text by other bytes; here
// they get their names.
constexpr std::string_view kPdfMagic = "%PDF-";
constexpr std::array<Format, 19> kFormats = {{
    {"PAR1"sv, "a parquet file", kTakeOut},
    {"ARROW1"sv, "an Arrow file", kTakeOut},
    {"FEA1"sv, "a Feather file", kTakeOut},
    {"SQLite format 3\0"sv, "an SQLite database", kTakeOut},
    {"\x89HDF\r\n"sv, "an HDF5 file", kTakeOut},
    {"\x1f\x8b"sv, "compressed with gzip", kUnpack},
    {"\x28\xb5\x2f\xfd"sv, "compressed with zstd", kUnpack},
    {"\xfd"
     "7zXZ\0"sv,
     "compressed with xz", kUnpack},
    {"1AY&SY"sv, "compressed with bzip2", kUnpack, 4},
    {"PK\x03\x04"sv, "a zip archive (so are npz and torch.save files)", kUnpack},
    {"ustar"sv, "a tar archive", kUnpack, 257},
    {kPdfMagic, "a PDF", kToText},
    {"\xff\xfe"sv, "UTF-16 text", "convert it to UTF-8 first, e.g. iconv -f utf-16 -t utf-8"},
    {"\xfe\xff"sv, "UTF-16 text", "convert it to UTF-8 first, e.g. iconv -f utf-16 -t utf-8"},
    {"\x93NUMPY"sv, "a NumPy array", "token ids become a token file in the format of docs/data.md"},
    {"\x7f"
     "ELF"sv,
     "a program", kNoText},
    {"\x80\x02"sv, "a Python pickle", kTakeOut},
    {"\x80\x04"sv, "a Python pickle", kTakeOut},
    {"\x80\x05"sv, "a Python pickle", kTakeOut},
}};

// Eight bytes say how long the JSON after them is.
bool is_safetensors(std::string_view first) {
  return first.size() > 9 && first.substr(5, 3) == "\0\0\0"sv && first[8] == '{';
}

bool is_json_object(std::string_view line) {
  return line.starts_with('{') && nlohmann::json::accept(line);
}

// A text may begin with a brace, and a JSON document may be one line.
bool is_json_lines(std::string_view first, bool is_cut, const std::string& path) {
  constexpr int kEnough = 8;
  const bool is_named_so = path.ends_with(".jsonl") || path.ends_with(".ndjson");
  int num_objects = 0;
  while (!first.empty() && num_objects < kEnough) {
    const size_t end = first.find('\n');
    // A line that goes on beyond what was read.
    if (end == std::string_view::npos && is_cut) return num_objects > 1 || is_named_so;
    std::string_view line = first.substr(0, end);
    first.remove_prefix(std::min(first.size(), line.size() + 1));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    if (!is_json_object(line)) return false;
    ++num_objects;
  }
  return num_objects > 1 || (num_objects == 1 && is_named_so);
}

// Where the first byte is that UTF-8 text does not have; npos: nowhere.
size_t first_not_utf8(std::string_view text, bool is_cut) {
  constexpr size_t kLongest = 4;
  for (size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {  // most of them, without a call
      ++at;
      continue;
    }
    const size_t length = decode_utf8(text.substr(at)).num_bytes;
    if (length == 0) return is_cut && text.size() - at < kLongest ? std::string_view::npos : at;
    at += length;
  }
  return std::string_view::npos;
}

std::string not_utf8_text(unsigned char byte, size_t at) {
  char code[5];
  std::snprintf(code, sizeof code, "0x%02x", static_cast<unsigned>(byte));
  return concat("is not UTF-8 text (byte ", code, " at ", at,
                "); convert it first, e.g. iconv -f latin1 -t utf-8");
}

JudgedFile judge(std::string_view first, bool is_cut, const std::string& path) {
  constexpr size_t kNowhere = std::string_view::npos;
  const size_t zero = first.find('\0');
  const size_t wrong = first_not_utf8(first, is_cut);
  if (zero == kNowhere && wrong == kNowhere && !first.starts_with(kPdfMagic)) {
    if (!is_json_lines(first, is_cut, path)) return {};
    return {FileContent::kJsonLines,
            "has JSON objects as lines; write their text to a file first, e.g. jq -r .text "
            "(docs/data.md shows more)"};
  }
  for (const Format& format : kFormats)
    if (first.size() > format.offset && first.substr(format.offset).starts_with(format.magic))
      return {FileContent::kBinary, concat("is ", format.name, "; ", format.fix)};
  if (is_safetensors(first))
    return {FileContent::kBinary, concat("is a safetensors file; ", kNoText)};
  if (zero != kNowhere)
    return {FileContent::kBinary, concat("is no text (a zero byte at ", zero, "); ", kNoText)};
  return {FileContent::kNotUtf8, not_utf8_text(static_cast<unsigned char>(first[wrong]), wrong)};
}

}  // namespace

JudgedFile judge_file(const std::string& path, int64_t file_bytes) {
  const auto count =
      static_cast<size_t>(std::min(file_bytes, static_cast<int64_t>(kLookedAtBytes)));
  std::string first(count, '\0');
  FileReader(path).read(0, std::as_writable_bytes(std::span(first)));
  return judge(first, static_cast<int64_t>(count) < file_bytes, path);
}

}  // namespace fsdp
