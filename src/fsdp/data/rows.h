// Rows of JSON lines, JSON arrays and parquet files: the forms in which data sets write texts,
// completions and chats, and the document that a row becomes.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/data/tokenizer.h"

namespace fsdp {

enum class RowKind : uint8_t { kNone, kText, kCompletion, kChat };

// By a row's fields (the table in rows.cpp). With a `field`, only the text of that name counts.
RowKind row_kind(const nlohmann::json& row, const std::string& field);

// With lists of messages and texts, which stand for a row with that alone. kNone for other JSON.
RowKind row_kind_of_text(std::string_view row, const std::string& field);

// The fields by which a row's kind is known, or that become a part of its document.
std::vector<std::string> row_fields(const std::string& field);

// Whether rows of the kind have parts that are not learnt.
constexpr bool has_mask(RowKind kind) {
  return kind == RowKind::kCompletion || kind == RowKind::kChat;
}

// Rows that are odd in one way.
struct OddRows {
  int64_t count = 0;
  std::string first = {};   // the place of the first one
  std::string detail = {};  // what it has there

  void add(const std::string& place, const std::string& its_detail = {});
  void add(const OddRows& more);
};

// Makes documents of the rows of one file. All must be of the kind of the first; an Error names the
// row that is not.
class RowReader {
 public:
  // `unit`: what a row of the file is called, "line" or "row".
  RowReader(std::string path, std::string unit, std::string field);

  // The next row; `number` counts from 1.
  Document read(std::string_view row, int64_t number);

  // Rows with a role that no chat template is known to have.
  const OddRows& unknown_roles() const { return unknown_roles_; }

 private:
  Document read_chat(const nlohmann::json& row, Document document);

  const std::string path_;
  const std::string unit_;
  const std::string field_;
  RowKind kind_ = RowKind::kNone;  // not known yet
  std::string first_fields_;       // of the first row, as an error says them
  OddRows unknown_roles_;
};

}  // namespace fsdp
