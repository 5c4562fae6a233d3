// Rows of data sets as documents: JSON objects with a text, a prompt and its completion, or a chat.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "fsdp/data/tokenizer.h"

namespace fsdp {

enum class RowKind : uint8_t { kNone, kText, kCompletion, kChat };

// What a row is by its fields: "messages"; "prompt" and "completion"; or "text", in this order. Of
// a `field` that is not "" only the text in it counts.
RowKind row_kind(const nlohmann::json& row, const std::string& field);

// The same of a line; kNone for what is no JSON object.
RowKind row_kind_of_line(std::string_view line, const std::string& field);

// Whether a row of the kind has parts that are not learnt.
constexpr bool has_mask(RowKind kind) {
  return kind == RowKind::kCompletion || kind == RowKind::kChat;
}

// Makes documents of the rows of one file. All must be of the kind of the first; an Error names the
// row that is not.
class RowReader {
 public:
  // `unit`: what a row of the file is called, "line" or "row".
  RowReader(std::string path, std::string unit, std::string field);

  // The next row; `number` counts from 1.
  Document read(std::string_view line, int64_t number);

 private:
  [[noreturn]] void refuse(int64_t number, const std::string& what) const;

  std::string path_;
  std::string unit_;
  std::string field_;
  RowKind kind_ = RowKind::kNone;  // not known yet
};

}  // namespace fsdp
