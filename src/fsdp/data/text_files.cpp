#include "fsdp/data/text_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/data/row_files.h"

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

// Formats that people have beside their text. Bytes that text does not have would give all of them
// away but PDFs; this table gives them names.
constexpr std::string_view kPdfMagic = "%PDF-";
constexpr std::string_view kParquetMagic = "PAR1";
constexpr std::array<Format, 18> kFormats = {{
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

// A safetensors file: eight bytes with the length of the JSON that follows them.
bool is_safetensors(std::string_view first) {
  return first.size() > 9 && first.substr(5, 3) == "\0\0\0"sv && first[8] == '{';
}

bool is_json_object(std::string_view line) {
  return line.starts_with('{') && nlohmann::json::accept(line);
}

// By its name, or by its first lines: a text may begin with a brace, and a JSON document may be one
// line.
bool is_json_lines(std::string_view first, bool is_cut, const std::string& path) {
  constexpr int kEnough = 8;
  if (path.ends_with(".jsonl") || path.ends_with(".ndjson")) return true;
  int num_objects = 0;
  while (!first.empty() && num_objects < kEnough) {
    const size_t end = first.find('\n');
    if (end == std::string_view::npos && is_cut) break;  // the line goes on beyond what was read
    std::string_view line = first.substr(0, end);
    first.remove_prefix(std::min(first.size(), line.size() + 1));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    if (!is_json_object(line)) return false;
    ++num_objects;
  }
  return num_objects > 1;
}

// The text without the white space before it.
std::string_view after_blanks(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
}

// An array whose first value is an object or a list of them. One of texts is known by its name,
// too: much else begins like it.
bool is_json_array(std::string_view first, const std::string& path) {
  first = after_blanks(first);
  if (!first.starts_with('[')) return false;
  first = after_blanks(first.substr(1));
  if (first.starts_with('"')) return path.ends_with(".json");
  if (first.starts_with('[')) first = after_blanks(first.substr(1));
  return first.starts_with('{');
}

constexpr const char* kNoRows =
    "has no rows that are known by their form; write a list of them, [{...}, {...}], to a .json "
    "file (jq .data FILE takes it out of a field 'data'), or one to each line of a .jsonl file";

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

struct JudgedFile {
  FileContent content = FileContent::kText;
  // Its kind and how its text is got, e.g. "is an Arrow file; ..."; "" for one that can be read.
  std::string problem = {};
};

JudgedFile judge(std::string_view first, bool is_cut, const std::string& path) {
  constexpr size_t kNowhere = std::string_view::npos;
  const size_t zero = first.find('\0');
  const size_t wrong = first_not_utf8(first, is_cut);
  if (zero == kNowhere && wrong == kNowhere && !first.starts_with(kPdfMagic)) {
    const std::string_view unmarked = without_mark(first);
    if (is_json_lines(unmarked, is_cut, path)) return {FileContent::kJsonLines};
    if (is_json_array(unmarked, path)) return {FileContent::kJsonArray};
    return {FileContent::kText, path.ends_with(".json") ? kNoRows : ""};
  }
  if (first.starts_with(kParquetMagic)) return {FileContent::kParquet};
  for (const Format& format : kFormats)
    if (first.size() > format.offset && first.substr(format.offset).starts_with(format.magic))
      return {FileContent::kBinary, concat("is ", format.name, "; ", format.fix)};
  if (is_safetensors(first))
    return {FileContent::kBinary, concat("is a safetensors file; ", kNoText)};
  if (zero != kNowhere)
    return {FileContent::kBinary, concat("is no text (a zero byte at ", zero, "); ", kNoText)};
  return {FileContent::kNotUtf8, not_utf8_text(static_cast<unsigned char>(first[wrong]), wrong)};
}

JudgedFile judge_file(const std::string& path, int64_t file_bytes) {
  const auto count =
      static_cast<size_t>(std::min(file_bytes, static_cast<int64_t>(kLookedAtBytes)));
  std::string first(count, '\0');
  FileReader(path).read(0, std::as_writable_bytes(std::span(first)));
  return judge(first, static_cast<int64_t>(count) < file_bytes, path);
}

// Goes through one directory that was named.
class DirectoryWalk {
 public:
  DirectoryWalk(TextFiles& files, const std::string& field) : files_(files), field_(field) {}

  void enter(const std::string& directory, const struct stat& status) {
    // Links can lead back to a directory above.
    if (!entered_.insert({status.st_dev, status.st_ino}).second) return;
    std::vector<std::string> names = names_in(directory);
    std::sort(names.begin(), names.end());
    for (const std::string& name : names)
      take(directory.ends_with('/') ? directory + name : concat(directory, "/", name), name);
  }

 private:
  void take(const std::string& path, const std::string& name) {
    struct stat status {};
    if (name.starts_with('.')) {
      ++files_.left_out.num_hidden;
    } else if (::stat(path.c_str(), &status) != 0) {
      ++files_.left_out.num_other;
    } else if (S_ISDIR(status.st_mode)) {
      enter(path, status);
    } else if (!S_ISREG(status.st_mode)) {
      ++files_.left_out.num_other;
    } else if (status.st_size == 0) {
      ++files_.left_out.num_empty;
    } else {
      take_text(path, status.st_size);
    }
  }

  void take_text(const std::string& path, int64_t file_bytes) {
    LeftOut& left_out = files_.left_out;
    const JudgedFile judged = judge_file(path, file_bytes);
    switch (judged.content) {
      case FileContent::kText:
        if (judged.problem.empty())
          keep({.path = path, .bytes = file_bytes});
        else
          ++left_out.num_rows;
        return;
      case FileContent::kJsonLines:
      case FileContent::kJsonArray:
      case FileContent::kParquet: {
        const RowKind kind = row_kind_of_file(path, judged.content, field_);
        if (kind == RowKind::kNone)
          ++left_out.num_rows;
        else
          keep({path, judged.content, has_mask(kind), file_bytes});
        return;
      }
      case FileContent::kNotUtf8:
        ++left_out.num_not_utf8;
        return;
      case FileContent::kBinary:
        ++left_out.num_binary;
        return;
    }
  }

  void keep(TextFile file) {
    files_.bytes += file.bytes;
    files_.files.push_back(std::move(file));
  }

  TextFiles& files_;
  const std::string& field_;
  std::set<std::pair<dev_t, ino_t>> entered_;
};

// A data set has a README and its like.
void leave_out_text_beside_rows(TextFiles& files) {
  const auto is_text = [](const TextFile& file) { return file.content == FileContent::kText; };
  if (std::all_of(files.files.begin(), files.files.end(), is_text)) return;
  for (const TextFile& each : files.files) {
    if (!is_text(each)) continue;
    if (files.left_out.num_beside_rows == 0) files.left_out.first_beside_rows = each.path;
    ++files.left_out.num_beside_rows;
    files.bytes -= each.bytes;
  }
  std::erase_if(files.files, is_text);
}

TextFiles in_directory(const std::string& path, const struct stat& status,
                       const std::string& field) {
  TextFiles files;
  DirectoryWalk(files, field).enter(path, status);
  FSDP_CHECK(!files.files.empty(), path, ": no text files in this directory",
             files.left_out.total() == 0 ? std::string()
                                         : concat(" (left out: ", to_text(files.left_out), ")"),
             "; name one with text, or packed token files by their own names");
  std::sort(files.files.begin(), files.files.end(),
            [](const TextFile& a, const TextFile& b) { return a.path < b.path; });
  leave_out_text_beside_rows(files);
  return files;
}

// A file that was named, and so must be one that can be read.
TextFile named_file(const std::string& path, int64_t file_bytes, const TextFileOptions& options) {
  if (options.named == NamedFiles::kAnyBytes) return {.path = path};
  const JudgedFile judged = judge_file(path, file_bytes);
  TextFile file{.path = path, .content = judged.content};
  if (judged.problem.empty()) {
    file.has_mask = has_mask(row_kind_of_file(path, file.content, options.field));
    return file;
  }
  throw Error(concat(path, ": ", judged.problem,
                     ", or pack its bytes as they are with fsdp data pack --any-bytes"));
}

void append(TextFiles& files, const TextFiles& more) {
  files.files.insert(files.files.end(), more.files.begin(), more.files.end());
  files.bytes += more.bytes;
  files.left_out += more.left_out;
}

}  // namespace

bool TextFiles::has_mask() const {
  return std::any_of(files.begin(), files.end(),
                     [](const TextFile& file) { return file.has_mask; });
}

TextFiles find_text_files(std::span<const std::string> paths, const TextFileOptions& options) {
  TextFiles files;
  for (const std::string& path : paths) {
    struct stat status {};
    FSDP_CHECK(::stat(path.c_str(), &status) == 0, path,
               ": cannot be read: ", std::generic_category().message(errno), "; check the path");
    if (S_ISDIR(status.st_mode)) {
      append(files, in_directory(path, status, options.field));
      continue;
    }
    FSDP_CHECK(S_ISREG(status.st_mode), path, ": is a device or a pipe; name files or directories");
    FSDP_CHECK(status.st_size > 0, path, ": is empty; name a file with text");
    append(files, {.files = {named_file(path, status.st_size, options)}, .bytes = status.st_size});
  }
  return files;
}

LeftOut& LeftOut::operator+=(const LeftOut& more) {
  num_hidden += more.num_hidden;
  num_binary += more.num_binary;
  num_not_utf8 += more.num_not_utf8;
  num_rows += more.num_rows;
  num_beside_rows += more.num_beside_rows;
  if (first_beside_rows.empty()) first_beside_rows = more.first_beside_rows;
  num_empty += more.num_empty;
  num_other += more.num_other;
  return *this;
}

std::string to_text(const LeftOut& left_out) {
  std::vector<std::string> parts;
  const auto add = [&](int64_t count, const std::string& kind) {
    if (count > 0) parts.push_back(concat(grouped_text(count), " ", kind));
  };
  add(left_out.num_hidden, "hidden");
  add(left_out.num_binary, "binary");
  add(left_out.num_not_utf8, "not UTF-8");
  add(left_out.num_rows, "with other rows");
  if (left_out.num_beside_rows > 0)
    add(left_out.num_beside_rows,
        concat("of text beside rows (", left_out.first_beside_rows, "; name it to learn it)"));
  add(left_out.num_empty, "empty");
  add(left_out.num_other, "other than files");
  return join(parts, ", ");
}

std::string_view without_mark(std::string_view text) {
  constexpr std::string_view kMark = "\xef\xbb\xbf";
  return text.substr(text.starts_with(kMark) ? kMark.size() : 0);
}

}  // namespace fsdp
