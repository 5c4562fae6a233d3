#include "fsdp/data/row_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/data/python_worker.h"

namespace fsdp {

void FilePieces::read(std::string& text, size_t num_bytes) {
  const auto count = std::min(static_cast<int64_t>(num_bytes), reader_.bytes() - offset_);
  const size_t before = text.size();
  text.resize(before + static_cast<size_t>(count));
  reader_.read(offset_, std::as_writable_bytes(std::span(text).subspan(before)));
  offset_ += count;
}

namespace {

constexpr size_t kFirstPieceBytes = 64 << 10;  // a reader that wants one row needs no more

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

void read_lines(const std::string& path, const TakeRow& take) {
  FilePieces pieces(path);
  std::string text;
  for (int64_t number = 0; !pieces.is_at_end();) {
    pieces.read(text, number == 0 ? kFirstPieceBytes : kTextAtATime);
    size_t begin = 0;
    while (begin < text.size()) {
      size_t end = text.find('\n', begin);
      if (end == std::string::npos) {
        if (!pieces.is_at_end()) break;  // the line goes on
        end = text.size();
      }
      const std::string_view line = std::string_view(text).substr(begin, end - begin);
      ++number;
      if (!is_blank(line) && !take(line, number, static_cast<int64_t>(line.size() + 1))) return;
      begin = end + 1;
    }
    text.erase(0, std::min(begin, text.size()));
  }
}

// Finds where the objects, lists and texts of an array end; what is in them is for a parser.
class ArrayScanner {
 public:
  // Whether the byte ends a row.
  bool ends_row(char c) {
    const bool is_in_row = depth_ > 1 || (depth_ == 1 && is_in_text_);
    if (is_in_row) row_ += c;
    if (is_in_text_) {
      is_in_text_ = is_escaped_ || c != '"';
      is_escaped_ = !is_escaped_ && c == '\\';
      return !is_in_text_ && depth_ == 1;
    }
    if (c == '"') {
      is_in_text_ = true;
      if (depth_ == 1) row_ = c;
      has_other_values_ = has_other_values_ || depth_ < 1;
    } else if (c == '[' || c == '{') {
      if (++depth_ == 2) row_ = c;
    } else if (c == ']' || c == '}') {
      return --depth_ == 1;
    } else if (!is_in_row && !is_blank({&c, 1}) && c != ',' && c != '\n') {
      has_other_values_ = true;
    }
    return false;
  }

  const std::string& row() const { return row_; }
  bool is_closed() const { return depth_ == 0; }
  bool has_other_values() const { return has_other_values_; }

 private:
  std::string row_;
  int64_t depth_ = 0;
  bool is_in_text_ = false;
  bool is_escaped_ = false;
  bool has_other_values_ = false;
};

void read_array(const std::string& path, const TakeRow& take) {
  FilePieces pieces(path);
  ArrayScanner scanner;
  std::string text;
  int64_t number = 0;
  while (!pieces.is_at_end()) {
    text.clear();
    const bool is_beginning = pieces.is_at_beginning();
    pieces.read(text, number == 0 ? kFirstPieceBytes : kTextAtATime);
    for (const char c : is_beginning ? without_mark(text) : text) {
      if (!scanner.ends_row(c)) continue;
      const std::string& row = scanner.row();
      if (!take(row, ++number, static_cast<int64_t>(row.size()))) return;
    }
    FSDP_CHECK(!scanner.has_other_values(), path, ": has a value after row ", number,
               " of its array that is no object, list or text; leave it out");
  }
  FSDP_CHECK(scanner.is_closed(), path, ": ends within row ", number + 1,
             " of its array; use a whole copy");
}

// The worker makes JSON lines of the rows.
void read_parquet(const std::string& path, const std::string& field, const TakeRow& take) {
  const PythonWorker worker("pyarrow", path);
  static_cast<void>(
      worker.ask({{"action", "open_parquet"}, {"path", path}, {"fields", row_fields(field)}}));
  for (int64_t number = 0;;) {
    const PythonWorker::Message answer = worker.ask({{"action", "read_parquet"}});
    if (answer.head.at("is_last").get<bool>()) return;
    std::string_view lines = answer.payload;
    while (!lines.empty()) {
      const std::string_view line = lines.substr(0, lines.find('\n'));
      lines.remove_prefix(std::min(lines.size(), line.size() + 1));
      // How far the file is read is not known; its rows are counted as what they became.
      if (!take(line, ++number, static_cast<int64_t>(line.size()))) return;
    }
  }
}

}  // namespace

void read_rows(const std::string& path, FileContent content, const std::string& field,
               const TakeRow& take) {
  if (content == FileContent::kJsonLines) return read_lines(path, take);
  if (content == FileContent::kJsonArray) return read_array(path, take);
  FSDP_ASSERT(content == FileContent::kParquet, path);
  read_parquet(path, field, take);
}

RowKind row_kind_of_file(const std::string& path, FileContent content, const std::string& field) {
  RowKind kind = RowKind::kNone;
  if (content == FileContent::kText) return kind;
  read_rows(path, content, field, [&](std::string_view row, int64_t, int64_t) {
    kind = row_kind_of_text(row, field);
    return false;
  });
  return kind;
}

}  // namespace fsdp
