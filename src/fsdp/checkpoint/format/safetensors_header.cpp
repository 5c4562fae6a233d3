#include "fsdp/checkpoint/format/safetensors_header.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/utf8.h"

namespace fsdp {

namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr const char* kMetadata = "__metadata__";

constexpr std::array<std::pair<std::string_view, DType>, 9> kDTypes = {
    {{"F64", DType::kFloat64},
     {"F32", DType::kFloat32},
     {"F16", DType::kFloat16},
     {"BF16", DType::kBFloat16},
     {"F8_E4M3", DType::kFloat8E4M3},
     {"F8_E5M2", DType::kFloat8E5M2},
     {"I64", DType::kInt64},
     {"I32", DType::kInt32},
     {"U8", DType::kUInt8}}};

// Error for a size that overflows; beside a 0, other sizes may be anything.
int64_t data_bytes(const SafetensorsEntry& entry) {
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) return 0;
  int64_t bytes = element_bytes(entry.dtype);
  for (const int64_t size : entry.shape) bytes = checked_mul(bytes, size);
  return bytes;
}

// Reads one tensor's description; every error names the tensor.
class EntryReader {
 public:
  EntryReader(const std::string& source, const std::string& name, const Json& value)
      : source_(source), name_(name), value_(value) {}

  SafetensorsEntry read() const {
    FSDP_CHECK(value_.is_object(), what(), " is described by no JSON object");
    for (const auto& [key, ignored] : value_.items())
      FSDP_CHECK(key == "dtype" || key == "shape" || key == "data_offsets", what(),
                 " has the field '", shown(key), "', which safetensors does not");
    SafetensorsEntry entry{.name = name_, .dtype = dtype(), .shape = integers("shape")};
    const std::vector<int64_t> offsets = integers("data_offsets");
    FSDP_CHECK(offsets.size() == 2, what(), " has ", offsets.size(),
               " data_offsets: two are needed");
    entry.begin = offsets[0];
    entry.end = offsets[1];
    FSDP_CHECK(entry.begin <= entry.end, what(), " ends at byte ", entry.end,
               ", before it begins (", entry.begin, ")");
    check_size(entry);
    return entry;
  }

 private:
  std::string what() const { return concat(source_, ": tensor '", shown(name_), "'"); }

  const Json& field(const char* name) const {
    const auto it = value_.find(name);
    FSDP_CHECK(it != value_.end(), what(), " has no ", name);
    return *it;
  }

  DType dtype() const {
    const Json& value = field("dtype");
    FSDP_CHECK(value.is_string(), what(), " has a dtype that is no text");
    const auto& text = value.get_ref<const std::string&>();
    for (const auto& [name, dtype] : kDTypes)
      if (name == text) return dtype;
    throw Error(concat(what(), " has dtype ", shown(text), ", which is not supported here"));
  }

  std::vector<int64_t> integers(const char* name) const {
    const Json& value = field(name);
    FSDP_CHECK(value.is_array(), what(), " has a ", name, " that is no list");
    std::vector<int64_t> numbers;
    for (const Json& item : value) {
      // Unsigned numbers above the largest int64_t would wrap around.
      const bool fits =
          item.is_number_unsigned() && item.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
      FSDP_CHECK(fits, what(), " has ",
                 shown(item.dump(-1, ' ', true, Json::error_handler_t::replace)), " in its ", name,
                 ": whole numbers from 0 up are needed");
      numbers.push_back(item.get<int64_t>());
    }
    return numbers;
  }

  void check_size(const SafetensorsEntry& entry) const {
    int64_t bytes = 0;
    try {
      bytes = data_bytes(entry);
    } catch (const Error&) {
      throw Error(concat(what(), " has a shape of more bytes than can be counted"));
    }
    FSDP_CHECK(entry.end - entry.begin == bytes, what(), " has ", entry.end - entry.begin,
               " bytes of data, but its dtype and shape need ", bytes);
  }

  const std::string& source_;
  const std::string& name_;
  const Json& value_;
};

std::map<std::string, std::string> read_metadata(const Json& value, const std::string& source) {
  FSDP_CHECK(value.is_object(), source, ": ", kMetadata, " is not a JSON object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    FSDP_CHECK(text.is_string(), source, ": '", shown(key), "' in ", kMetadata, " is no text");
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

// Sorts by position; no byte may be missing or used twice.
void check_data_is_covered(std::vector<SafetensorsEntry>& tensors, int64_t data_bytes,
                           const std::string& source) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t covered = 0;
  for (const SafetensorsEntry& entry : tensors) {
    FSDP_CHECK(entry.end <= data_bytes, source, ": tensor '", shown(entry.name), "' ends at byte ",
               entry.end, " of ", data_bytes, " bytes of data; the file is truncated");
    FSDP_CHECK(entry.begin >= covered, source, ": tensor '", shown(entry.name), "' begins at byte ",
               entry.begin, ", inside the tensor before it, which ends at ", covered);
    FSDP_CHECK(entry.begin == covered, source, ": bytes ", covered, " to ", entry.begin,
               " before tensor '", shown(entry.name), "' belong to no tensor");
    covered = entry.end;
  }
  FSDP_CHECK(covered == data_bytes, source, ": ", data_bytes - covered,
             " bytes after the last tensor belong to none");
}

}  // namespace

std::string_view safetensors_name(DType dtype) {
  const auto* const it = std::find_if(kDTypes.begin(), kDTypes.end(),
                                      [&](const auto& each) { return each.second == dtype; });
  FSDP_ASSERT(it != kDTypes.end());
  return it->first;
}

int64_t safetensors_header_bytes(std::string_view first_8_bytes, int64_t file_bytes,
                                 const std::string& source) {
  FSDP_CHECK(
      file_bytes >= kLengthBytes && first_8_bytes.size() == static_cast<size_t>(kLengthBytes),
      source, " has ", file_bytes,
      " bytes: a safetensors file begins with 8 that say how "
      "long its header is");
  uint64_t length = 0;
  for (size_t i = 0; i < first_8_bytes.size(); ++i)
    length |= static_cast<uint64_t>(static_cast<unsigned char>(first_8_bytes[i])) << (8 * i);
  FSDP_CHECK(length <= static_cast<uint64_t>(kMaxSafetensorsHeaderBytes), source,
             ": the header claims ", length, " bytes: more than ", kMaxSafetensorsHeaderBytes,
             " are no safetensors header");
  const auto bytes = static_cast<int64_t>(length);
  FSDP_CHECK(bytes <= file_bytes - kLengthBytes, source, ": the header claims ", bytes,
             " bytes, but only ", file_bytes - kLengthBytes, " follow; the file is truncated");
  return bytes;
}

SafetensorsHeader parse_safetensors_header(std::string_view header, int64_t file_bytes,
                                           const std::string& source) {
  FSDP_CHECK(!header.empty() && header.front() == '{', source,
             ": the header does not begin with '{'");
  const Json document = parse_json(header, concat(source, ": the header"));
  FSDP_CHECK(document.is_object(), source, ": the header is not a JSON object");
  SafetensorsHeader result;
  result.data_begin = kLengthBytes + static_cast<int64_t>(header.size());
  FSDP_CHECK(result.data_begin <= file_bytes, source, ": the header ends at byte ",
             result.data_begin, " of a file of ", file_bytes);
  for (const auto& [name, value] : document.items()) {
    if (name == kMetadata) {
      result.metadata = read_metadata(value, source);
    } else {
      result.tensors.push_back(EntryReader(source, name, value).read());
    }
  }
  check_data_is_covered(result.tensors, file_bytes - result.data_begin, source);
  return result;
}

std::string write_safetensors_header(SafetensorsHeader& header, int64_t align_bytes) {
  // A list of members, because looking up each name in an object would take quadratic time.
  nlohmann::ordered_json::object_t members;
  if (!header.metadata.empty()) members.emplace_back(kMetadata, header.metadata);
  std::set<std::string_view> names = {kMetadata};
  int64_t offset = 0;
  for (SafetensorsEntry& entry : header.tensors) {
    if (!names.insert(entry.name).second)
      throw UsageError(concat("tensor name '", shown(entry.name),
                              "' cannot be written to a safetensors file; every tensor needs a "
                              "name of its own, other than ",
                              kMetadata));
    entry.begin = offset;
    entry.end = offset = checked_add(offset, data_bytes(entry));
    members.emplace_back(entry.name,
                         nlohmann::ordered_json{{"dtype", safetensors_name(entry.dtype)},
                                                {"shape", entry.shape},
                                                {"data_offsets", {entry.begin, entry.end}}});
  }
  std::string text;
  try {
    text = nlohmann::ordered_json(std::move(members)).dump();
  } catch (const Json::exception& error) {
    throw UsageError(concat("a name or metadata of a safetensors file is not UTF-8 (", error.what(),
                            "); use text"));
  }
  const int64_t used = kLengthBytes + static_cast<int64_t>(text.size());
  header.data_begin = round_up(used, align_bytes);
  text.append(static_cast<size_t>(header.data_begin - used), ' ');
  const auto length = static_cast<uint64_t>(text.size());
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>((length >> (8 * i)) & 0xFF));
  return bytes + text;
}

}  // namespace fsdp
