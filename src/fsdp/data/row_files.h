// The rows of a file, one after the other: lines of JSON, objects of a JSON array, rows of parquet.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "fsdp/base/durable_file.h"
#include "fsdp/data/rows.h"
#include "fsdp/data/text_files.h"

namespace fsdp {

inline constexpr size_t kTextAtATime = size_t{4} << 20;

// A file from its beginning to its end.
class FilePieces {
 public:
  explicit FilePieces(const std::string& path) : reader_(path) {}

  bool is_at_beginning() const { return offset_ == 0; }
  bool is_at_end() const { return offset_ == reader_.bytes(); }

  // Appends the next bytes.
  void read(std::string& text, size_t num_bytes = kTextAtATime);

 private:
  FileReader reader_;
  int64_t offset_ = 0;
};

// The text of a row, its number, which counts from 1, and how many bytes of the file it takes.
// Returns whether more rows are wanted.
using TakeRow = std::function<bool(std::string_view row, int64_t number, int64_t bytes)>;

// With a `field`, parquet rows have that one alone. Error that begins with the path.
void read_rows(const std::string& path, FileContent content, const std::string& field,
               const TakeRow& take);

// That of its first row; kNone for text.
RowKind row_kind_of_file(const std::string& path, FileContent content, const std::string& field);

}  // namespace fsdp
