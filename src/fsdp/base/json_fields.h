// Typed reading of JSON objects, with errors that name source, field, value and fix.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// A JSON document in which no object has a key twice: of two such values one parser keeps the first
// and another one the last. Nor is it nested more than 100 deep. UsageError that begins with
// `source`.
nlohmann::json parse_json(std::string_view text, const std::string& source);

// One JSON object at one place of a document; holds references to both, so keep the document alive.
class JsonFields {
 public:
  // `place` is the path inside the document, "" for its root, "units[3]" for a unit.
  JsonFields(const nlohmann::json& object, std::string source, std::string place);

  // Absent and null are both "not given".
  bool has(const char* field) const;
  // Where a class's default is a number, null still says "none".
  bool is_null(const char* field) const;

  int64_t integer(const char* field) const;
  int64_t integer_or(const char* field, int64_t fallback) const;
  double number_or(const char* field, double fallback) const;
  bool boolean_or(const char* field, bool fallback) const;
  std::string text(const char* field) const;
  std::string text_or(const char* field, const std::string& fallback) const;

  const nlohmann::json& array(const char* field) const;

  // The object at this field.
  JsonFields object(const char* field) const;

  // Element `index` of array(field), which must be an object.
  JsonFields element(const char* field, size_t index) const;

  std::vector<std::string> keys() const;

  // Refuses fields that are not in the list, with the nearest one that is.
  void allow_only(std::initializer_list<const char*> known) const;

  // "source: place.field is VALUE; RULE"
  [[noreturn]] void refuse(const std::string& field, const std::string& rule) const;

 private:
  const nlohmann::json& required(const char* field) const;
  std::string path_of(const std::string& field) const;

  const nlohmann::json& object_;
  std::string source_;
  std::string place_;
};

}  // namespace fsdp
