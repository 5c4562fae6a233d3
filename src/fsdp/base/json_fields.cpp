#include "fsdp/base/json_fields.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// Values are quoted in messages; a whole document would not be one sentence.
std::string short_text(const nlohmann::json& value) {
  constexpr size_t kMaxChars = 60;
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kMaxChars) text = text.substr(0, kMaxChars) + "...";
  return text;
}

// The library's messages begin with their class and number in brackets, and syntax errors also
// with their class in words; people need the rest.
std::string syntax_problem(const nlohmann::json::exception& error) {
  const std::string what = error.what();
  for (const std::string_view before : {"parse error ", "] "}) {
    const size_t found = what.find(before);
    if (found != std::string::npos) return what.substr(found + before.size());
  }
  return what;
}

// Builds the document, and refuses what the library would accept: keys that an object has twice,
// and nesting without end.
class DocumentBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  using Json = nlohmann::json;

  Json take_document() { return std::move(document_); }
  // "" for none.
  const std::string& fault() const { return fault_; }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t& value) override { return put(std::move(value)); }

  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [member, is_new] = open_.back()->emplace(name, nullptr);
    member_ = &*member;
    if (!is_new) fault_ = concat("it has the key '", shown(name), "' twice; keep one");
    return is_new;
  }

  // Also for numbers out of range.
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    fault_ = concat("not valid JSON, ", shown(syntax_problem(error)));
    return false;
  }

 private:
  // Values are copied and written by functions that call themselves: without a limit a short text
  // could exhaust the stack.
  static constexpr size_t kMaxDepth = 100;

  Json& next_place() {
    if (open_.empty()) return document_;
    return open_.back()->is_array() ? open_.back()->emplace_back() : *member_;
  }
  bool put(Json value) {
    next_place() = std::move(value);
    return true;
  }
  bool open(Json empty) {
    Json& place = next_place();
    place = std::move(empty);
    open_.push_back(&place);  // stays where it is: nothing is added before it until it is closed
    if (open_.size() <= kMaxDepth) return true;
    fault_ = concat("it is nested more than ", kMaxDepth, " deep; nothing is");
    return false;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  Json document_;
  std::vector<Json*> open_;  // from the outermost on
  Json* member_ = nullptr;   // of an open object, whose key was read
  std::string fault_;
};

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& source) {
  // The parser takes a zero byte for the end of the text and would not see what follows it.
  const size_t zero = text.find('\0');
  if (zero != std::string_view::npos)
    throw UsageError(concat(source, ": not valid JSON, at byte ", zero, ": a zero byte"));
  DocumentBuilder builder;
  nlohmann::json::sax_parse(text, &builder);
  if (!builder.fault().empty()) throw UsageError(concat(source, ": ", builder.fault()));
  return builder.take_document();
}

JsonFields::JsonFields(const nlohmann::json& object, std::string source, std::string place)
    : object_(object), source_(std::move(source)), place_(std::move(place)) {
  if (!object_.is_object())
    throw UsageError(concat(source_, ": ", place_.empty() ? "the document" : place_, " is ",
                            short_text(object_), "; it must be an object {...}"));
}

bool JsonFields::has(const char* field) const {
  const auto found = object_.find(field);
  return found != object_.end() && !found->is_null();
}

bool JsonFields::is_null(const char* field) const {
  const auto found = object_.find(field);
  return found != object_.end() && found->is_null();
}

int64_t JsonFields::integer(const char* field) const {
  const nlohmann::json& value = required(field);
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX}))
    refuse(field, "it must be a whole number");
  return value.get<int64_t>();
}

int64_t JsonFields::integer_or(const char* field, int64_t fallback) const {
  return has(field) ? integer(field) : fallback;
}

double JsonFields::number_or(const char* field, double fallback) const {
  if (!has(field)) return fallback;
  if (!object_.at(field).is_number()) refuse(field, "it must be a number");
  return object_.at(field).get<double>();
}

bool JsonFields::boolean_or(const char* field, bool fallback) const {
  if (!has(field)) return fallback;
  if (!object_.at(field).is_boolean()) refuse(field, "it must be true or false");
  return object_.at(field).get<bool>();
}

std::string JsonFields::text(const char* field) const {
  const nlohmann::json& value = required(field);
  if (!value.is_string()) refuse(field, "it must be a string");
  return value.get<std::string>();
}

std::string JsonFields::text_or(const char* field, const std::string& fallback) const {
  return has(field) ? text(field) : fallback;
}

const nlohmann::json& JsonFields::array(const char* field) const {
  const nlohmann::json& value = required(field);
  if (!value.is_array()) refuse(field, "it must be an array [...]");
  return value;
}

JsonFields JsonFields::object(const char* field) const {
  return {required(field), source_, path_of(field)};
}

JsonFields JsonFields::element(const char* field, size_t index) const {
  return {array(field).at(index), source_, concat(path_of(field), "[", index, "]")};
}

std::vector<std::string> JsonFields::keys() const {
  std::vector<std::string> keys;
  for (const auto& item : object_.items()) keys.push_back(item.key());
  return keys;
}

void JsonFields::allow_only(std::initializer_list<const char*> known) const {
  const std::vector<std::string> names(known.begin(), known.end());
  for (const std::string& key : keys()) {
    if (std::find(names.begin(), names.end(), key) != names.end()) continue;
    const std::string near = nearest(key, names);
    throw UsageError(concat(source_, ": ", path_of(key), " is not a known field; ",
                            near.empty() ? "the" : concat("did you mean '", near, "'? The"),
                            " known fields are ", join(names, ", ")));
  }
}

void JsonFields::refuse(const std::string& field, const std::string& rule) const {
  const auto found = object_.find(field);
  throw UsageError(concat(source_, ": ", path_of(field), " is ",
                          found == object_.end() ? "missing" : short_text(*found), "; ", rule));
}

const nlohmann::json& JsonFields::required(const char* field) const {
  const auto found = object_.find(field);
  if (found == object_.end()) refuse(field, "add it");
  return *found;
}

std::string JsonFields::path_of(const std::string& field) const {
  return place_.empty() ? shown(field) : concat(place_, ".", shown(field));
}

}  // namespace fsdp
