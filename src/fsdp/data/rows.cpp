#include "fsdp/data/rows.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using Json = nlohmann::json;

// --- forms ---------------------------------------------------------------------------------------

bool has_text(const Json& row, const char* field) {
  const auto found = row.find(field);
  return found != row.end() && found->is_string();
}

// Messages as OpenAI's interface has them, or ShareGPT's files.
bool is_message(const Json& message) {
  return message.is_object() && (has_text(message, "role") || has_text(message, "from"));
}

bool has_messages(const Json& row, const char* field) {
  const auto found = row.find(field);
  return found != row.end() && found->is_array() && !found->empty() &&
         std::all_of(found->begin(), found->end(), is_message);
}

Json message(const char* role, const Json& content) {
  return {{"role", role}, {"content", content}};
}

Json joined(const Json& first, const Json& second) {
  Json all = first;
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

// Earlier questions and answers, [["question", "answer"], ...], are turns before the row's own.
bool is_history(const Json& history) {
  const auto is_turn = [](const Json& turn) {
    return turn.is_array() && turn.size() == 2 && turn[0].is_string() && turn[1].is_string();
  };
  return history.is_null() ||
         (history.is_array() && std::all_of(history.begin(), history.end(), is_turn));
}

Json instruction_messages(const Json& row) {
  std::string asked = row.at("instruction").get<std::string>();
  if (has_text(row, "input"))
    if (const auto input = row.at("input").get<std::string>(); !input.empty())
      asked += concat("\n\n", input);
  Json messages = Json::array();
  if (row.contains("history"))
    for (const Json& turn : row.at("history")) {
      messages.push_back(message("user", turn[0]));
      messages.push_back(message("assistant", turn[1]));
    }
  messages.push_back(message("user", asked));
  messages.push_back(message("assistant", row.at("output")));
  return messages;
}

struct RowForm {
  const char* fields;  // as an error says them
  RowKind kind;
  bool (*fits)(const Json& row);
  Json (*messages)(const Json& row);  // of chats
};

// The first that fits counts.
constexpr std::array<RowForm, 6> kForms = {{
    {"a list 'messages' of objects with a 'role'", RowKind::kChat,
     [](const Json& row) { return has_messages(row, "messages"); },
     [](const Json& row) { return row.at("messages"); }},
    {"a list 'conversations' of objects with a 'from'", RowKind::kChat,
     [](const Json& row) { return has_messages(row, "conversations"); },
     [](const Json& row) { return row.at("conversations"); }},
    {"lists of messages named 'prompt' and 'completion'", RowKind::kChat,
     [](const Json& row) { return has_messages(row, "prompt") && has_messages(row, "completion"); },
     [](const Json& row) { return joined(row.at("prompt"), row.at("completion")); }},
    {"texts named 'prompt' and 'completion'", RowKind::kCompletion,
     [](const Json& row) { return has_text(row, "prompt") && has_text(row, "completion"); },
     nullptr},
    {"texts named 'instruction' and 'output'", RowKind::kChat,
     [](const Json& row) { return has_text(row, "instruction") && has_text(row, "output"); },
     &instruction_messages},
    {"a text named 'text'", RowKind::kText, [](const Json& row) { return has_text(row, "text"); },
     nullptr},
}};

const RowForm* form_of(const Json& row) {
  const auto found = std::find_if(kForms.begin(), kForms.end(),
                                  [&](const RowForm& form) { return form.fits(row); });
  return found == kForms.end() ? nullptr : &*found;
}

// Forms of data for other trainings, which would be taken for one that lacks something.
struct ForeignForm {
  const char* field;
  const char* what;
};
constexpr std::array<ForeignForm, 3> kForeignForms = {{
    {"chosen",
     "is a row of preferences ('chosen'), which nothing here is trained on; write the "
     "answers to learn as 'messages'"},
    {"input_ids",
     "has tokens ('input_ids') in place of text; write them to a token file "
     "(docs/data.md has the format)"},
    {"label",
     "is a row to classify ('label'), which nothing here is trained on; write its text as "
     "'text', or 'prompt' and 'completion'"},
}};

// A row that is a list of messages, or a text, has nothing else: it gets the field's name.
Json with_fields(Json row) {
  const bool is_chat =
      row.is_array() && !row.empty() && std::all_of(row.begin(), row.end(), is_message);
  if (!is_chat && !row.is_string()) return row;
  Json named = Json::object();
  named[is_chat ? "messages" : "text"] = std::move(row);
  return named;
}

std::string missing_text(const Json& row, const std::string& field) {
  if (!field.empty()) return concat("lacks a text named '", field, "'");
  for (const ForeignForm& each : kForeignForms)
    if (row.contains(each.field)) return each.what;
  std::vector<std::string> forms;
  for (const RowForm& form : kForms) forms.emplace_back(form.fields);
  return concat("lacks ", join(forms, ", "), " (or name another field with --field)");
}

// --- chats ---------------------------------------------------------------------------------------

struct RoleName {
  const char* foreign;
  const char* role;
};
constexpr std::array<RoleName, 9> kRoleNames = {{
    {"human", "user"},
    {"gpt", "assistant"},
    {"chatgpt", "assistant"},
    {"bot", "assistant"},
    {"model", "assistant"},
    {"ai", "assistant"},
    {"function_call", "assistant"},
    {"observation", "tool"},
    {"function_response", "tool"},
}};
constexpr std::array<const char*, 6> kRoles = {"system",    "developer", "user",
                                               "assistant", "tool",      "function"};

std::string role_of(const std::string& given) {
  for (const RoleName& each : kRoleNames)
    if (given == each.foreign) return each.role;
  return given;
}

bool is_known_role(const std::string& role) {
  return std::find(kRoles.begin(), kRoles.end(), role) != kRoles.end();
}

// Lists of parts are joined; the type of a part that is no text is the error.
Json text_of(const Json& content, std::optional<std::string>& error) {
  if (!content.is_array()) return content;
  std::string text;
  for (const Json& part : content) {
    if (part.is_string())
      text += part.get<std::string>();
    else if (part.is_object() && has_text(part, "text"))
      text += part.at("text").get<std::string>();
    else
      error = part.is_object() && has_text(part, "type") ? part.at("type").get<std::string>()
                                                         : part.dump();
  }
  return text;
}

}  // namespace

RowKind row_kind(const Json& row, const std::string& field) {
  if (!row.is_object()) return RowKind::kNone;
  if (!field.empty()) return has_text(row, field.c_str()) ? RowKind::kText : RowKind::kNone;
  const RowForm* const form = form_of(row);
  return form == nullptr ? RowKind::kNone : form->kind;
}

RowKind row_kind_of_text(std::string_view row, const std::string& field) {
  return row_kind(with_fields(Json::parse(row, nullptr, false)), field);
}

std::vector<std::string> row_fields(const std::string& field) {
  if (!field.empty()) return {field};
  return {"messages", "conversations", "tools",   "prompt", "completion", "instruction", "input",
          "output",   "system",        "history", "chosen", "label",      "input_ids",   "text"};
}

void OddRows::add(const std::string& place, const std::string& its_detail) {
  if (count++ > 0) return;
  first = place;
  detail = its_detail;
}

void OddRows::add(const OddRows& more) {
  if (count == 0) {
    first = more.first;
    detail = more.detail;
  }
  count += more.count;
}

// --- reading -------------------------------------------------------------------------------------

RowReader::RowReader(std::string path, std::string unit, std::string field)
    : path_(std::move(path)), unit_(std::move(unit)), field_(std::move(field)) {}

Document RowReader::read(std::string_view text, int64_t number) {
  Document document;
  document.place = concat(path_, ": ", unit_, " ", number);
  const auto refuse = [&](const std::string& what) {
    throw Error(concat(document.place, " ", what));
  };
  const Json row = with_fields(Json::parse(text, nullptr, false));
  if (!row.is_object()) refuse("is no JSON object; write one to each line");
  const RowKind kind = row_kind(row, field_);
  if (kind_ == RowKind::kNone) {
    if (kind == RowKind::kNone) refuse(missing_text(row, field_));
    kind_ = kind;
    first_fields_ = field_.empty() ? form_of(row)->fields : concat("a text named '", field_, "'");
  } else if (kind != kind_) {
    refuse(concat("lacks ", first_fields_,
                  ", which the rows before it have; keep rows of different kinds in files of their "
                  "own"));
  }
  switch (kind) {
    case RowKind::kText:
      document.text = row.at(field_.empty() ? "text" : field_).get<std::string>();
      break;
    case RowKind::kCompletion:
      document.text = row.at("prompt").get<std::string>();
      document.prompt_bytes = document.text.size();
      document.text += row.at("completion").get<std::string>();
      break;
    case RowKind::kChat:
      return read_chat(row, std::move(document));
    case RowKind::kNone:
      break;
  }
  return document;
}

Document RowReader::read_chat(const Json& row, Document document) {
  const RowForm* const form = form_of(row);
  if (form->messages == &instruction_messages && row.contains("history") &&
      !is_history(row.at("history")))
    throw Error(concat(document.place,
                       " has a 'history' that is no list of questions with their answers, such as "
                       "[[\"Hi\", \"Ho\"]]; write the turns as 'messages'"));
  Json messages = form->messages(row);
  std::string unknown_role;
  for (Json& each : messages) {
    // Parquet has every field in every message, and null where a message lacks one.
    if (!has_text(each, "role")) each["role"] = each.at("from");
    if (has_text(each, "value") && each.value("content", Json()).is_null())
      each["content"] = each.at("value");
    each.erase("from");
    each.erase("value");
    const std::string role = role_of(each.at("role").get<std::string>());
    if (!is_known_role(role) && unknown_role.empty()) unknown_role = role;
    each["role"] = role;
    if (!each.contains("content")) continue;
    std::optional<std::string> error;
    each["content"] = text_of(each.at("content"), error);
    if (error)
      throw Error(concat(document.place, " has a part '", *error,
                         "' in a message, which is no text; leave out rows with other parts"));
  }
  // A chat whose first message is of the system has its own.
  if (has_text(row, "system") && row.at("system") != "" && messages.at(0).at("role") != "system")
    messages.insert(messages.begin(), message("system", row.at("system")));
  if (!unknown_role.empty()) unknown_roles_.add(document.place, unknown_role);
  Json chat = {{"messages", std::move(messages)}};
  if (row.contains("tools")) chat["tools"] = row.at("tools");
  document.text = chat.dump();
  document.is_chat = true;
  return document;
}

}  // namespace fsdp
