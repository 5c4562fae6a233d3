#include "fsdp/data/json_rows.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {
namespace {

using Json = nlohmann::json;

bool has_text(const Json& row, const std::string& field) {
  const auto found = row.find(field);
  return found != row.end() && found->is_string();
}

bool has_chat(const Json& row) {
  const auto found = row.find("messages");
  if (found == row.end() || !found->is_array() || found->empty()) return false;
  for (const Json& message : *found)
    if (!message.is_object() || !has_text(message, "role")) return false;
  return true;
}

std::string text_field(const std::string& field) { return field.empty() ? "text" : field; }

// What a row of this kind has.
std::string fields_text(RowKind kind, const std::string& field) {
  switch (kind) {
    case RowKind::kText:
      return concat("a text named '", text_field(field), "'");
    case RowKind::kCompletion:
      return "the texts 'prompt' and 'completion'";
    case RowKind::kChat:
      return "a list 'messages' of objects with a 'role'";
    case RowKind::kNone:
      break;
  }
  return field.empty() ? "a text named 'text', texts named 'prompt' and 'completion', or a list "
                         "'messages' of objects with a 'role' (or name another field with --field)"
                       : fields_text(RowKind::kText, field);
}

bool is_of_kind(const Json& row, RowKind kind, const std::string& field) {
  switch (kind) {
    case RowKind::kText:
      return has_text(row, text_field(field));
    case RowKind::kCompletion:
      return has_text(row, "prompt") && has_text(row, "completion");
    case RowKind::kChat:
      return has_chat(row);
    case RowKind::kNone:
      break;
  }
  return false;
}

}  // namespace

RowKind row_kind(const Json& row, const std::string& field) {
  if (!row.is_object()) return RowKind::kNone;
  for (const RowKind kind : {RowKind::kChat, RowKind::kCompletion, RowKind::kText})
    if ((field.empty() || kind == RowKind::kText) && is_of_kind(row, kind, field)) return kind;
  return RowKind::kNone;
}

RowKind row_kind_of_line(std::string_view line, const std::string& field) {
  return row_kind(Json::parse(line, nullptr, false), field);
}

RowReader::RowReader(std::string path, std::string unit, std::string field)
    : path_(std::move(path)), unit_(std::move(unit)), field_(std::move(field)) {}

Document RowReader::read(std::string_view line, int64_t number) {
  const Json row = Json::parse(line, nullptr, false);
  if (!row.is_object()) refuse(number, "is no JSON object; write one to each line");
  if (kind_ == RowKind::kNone) {
    kind_ = row_kind(row, field_);
    if (kind_ == RowKind::kNone) refuse(number, concat("lacks ", fields_text(kind_, field_)));
  } else if (!is_of_kind(row, kind_, field_)) {
    refuse(number, concat("lacks ", fields_text(kind_, field_),
                          ", which the rows before it have; keep rows of different kinds in files "
                          "of their own"));
  }
  Document document;
  document.place = concat(path_, ": ", unit_, " ", number);
  if (kind_ == RowKind::kText) {
    document.text = row.at(text_field(field_)).get<std::string>();
  } else if (kind_ == RowKind::kCompletion) {
    document.text = row.at("prompt").get<std::string>();
    document.prompt_bytes = document.text.size();
    document.text += row.at("completion").get<std::string>();
  } else {
    Json chat = {{"messages", row.at("messages")}};
    if (row.contains("tools")) chat["tools"] = row.at("tools");
    document.text = chat.dump();
    document.is_chat = true;
  }
  return document;
}

void RowReader::refuse(int64_t number, const std::string& what) const {
  throw Error(concat(path_, ": ", unit_, " ", number, " ", what));
}

}  // namespace fsdp
