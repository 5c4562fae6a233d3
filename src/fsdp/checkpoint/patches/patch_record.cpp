#include "fsdp/checkpoint/patches/patch_record.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/utf8.h"
#include "fsdp/checkpoint/format/manifest_text.h"
#include "fsdp/checkpoint/format/safetensors_header.h"

namespace fsdp {

namespace {

constexpr const char* kPatchFormat = "fsdp patch";
constexpr int64_t kPatchVersion = 1;
constexpr int64_t kMaxRecordTextBytes = int64_t{1} << 30;
constexpr std::string_view kPatchPrefix = "patch-";

int64_t step_in(const JsonFields& fields, const char* field) {
  const int64_t step = fields.integer(field);
  if (step < 0 || step > kMaxStoredSteps) fields.refuse(field, "steps count from 0");
  return step;
}

bool is_base(std::string_view text) {
  return text.size() == 16 && std::all_of(text.begin(), text.end(), [](char c) {
           return ('0' <= c && c <= '9') || ('a' <= c && c <= 'f');
         });
}

StoredTensor tensor_in(const std::string& name, const JsonFields& fields) {
  StoredTensor tensor{.name = name, .dtype = {}, .shape = {}};
  const std::string type = fields.text("dtype");
  bool is_known = false;
  for (const DType dtype : all_dtypes())
    if (safetensors_name(dtype) == type) {
      tensor.dtype = dtype;
      is_known = true;
    }
  if (!is_known) fields.refuse("dtype", "it is not a dtype that is known here");
  for (const nlohmann::json& size : fields.array("shape")) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > (uint64_t{1} << 62))
      fields.refuse("shape", "sizes are whole numbers from 0 up");
    tensor.shape.push_back(size.get<int64_t>());
  }
  try {
    int64_t bytes = element_bytes(tensor.dtype);
    for (const int64_t size : tensor.shape) bytes = checked_mul(bytes, std::max<int64_t>(size, 1));
  } catch (const Error&) {
    fields.refuse("shape", "a tensor has fewer bytes than 2^63");
  }
  return tensor;
}

// {from, to} of "patch-00000100-00000102", {-1, to} of a full one; nullopt for every other name.
std::optional<std::pair<int64_t, int64_t>> steps_in(std::string_view name) {
  const size_t dash = name.rfind('-');
  if (!name.starts_with(kPatchPrefix) || dash < kPatchPrefix.size()) return std::nullopt;
  const auto number = [](std::string_view digits) {
    int64_t step = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
    return error == std::errc() && end == digits.data() + digits.size() ? step : -1;
  };
  const std::string_view first = name.substr(kPatchPrefix.size(), dash - kPatchPrefix.size());
  const std::pair<int64_t, int64_t> steps{number(first), number(name.substr(dash + 1))};
  if (steps.second < 0 || (steps.first < 0 && first != "full")) return std::nullopt;
  return steps;
}

StoredFile file_in(const JsonFields& fields) {
  const std::string path = fields.text("path");
  if (!is_plain_name(path)) fields.refuse("path", "it is not the name of a file in the patch");
  const int64_t bytes = fields.integer("bytes");
  if (bytes < 0) fields.refuse("bytes", "it must be at least 0");
  const int64_t checksum = fields.integer("crc32c");
  if (checksum < 0 || checksum > std::numeric_limits<uint32_t>::max())
    fields.refuse("crc32c", "checksums are whole numbers of 32 bits");
  return {path, bytes, static_cast<uint32_t>(checksum)};
}

}  // namespace

std::string to_json(const PatchRecord& record) {
  using Json = nlohmann::ordered_json;
  Json tensors = Json::object();
  for (const StoredTensor& tensor : record.tensors)
    tensors[tensor.name] = {{"dtype", safetensors_name(tensor.dtype)}, {"shape", tensor.shape}};
  Json files = Json::array();
  for (const StoredFile& file : record.files)
    files.push_back({{"path", file.path}, {"bytes", file.bytes}, {"crc32c", file.crc32c}});
  const Json document = {{"format", kPatchFormat},
                         {"version", kPatchVersion},
                         {"base", record.base},
                         {"begun", record.begun},
                         {"from", record.from ? Json(*record.from) : Json()},
                         {"to", record.to},
                         {"names", record.names},
                         {"tensors", std::move(tensors)},
                         {"files", std::move(files)}};
  return with_checksum(document.dump(1) + "\n");
}

PatchRecord parse_patch_record(std::string_view json, const std::string& source) {
  FSDP_CHECK(checksum_in(json) == ManifestChecksum::kRight, source,
             " is not what was written; the patch is damaged, so fetch it again");
  const nlohmann::json document = parse_json(json, source);
  const JsonFields fields(document, source, "");
  if (fields.text("format") != kPatchFormat)
    fields.refuse("format", concat("a patch of weights has '", kPatchFormat, "'"));
  if (fields.integer("version") != kPatchVersion)
    fields.refuse("version", concat("this fsdp.cpp reads version ", kPatchVersion,
                                    "; use the one that wrote it, or a newer one"));
  PatchRecord record{.base = fields.text("base"),
                     .begun = fields.integer("begun"),
                     .from = std::nullopt,
                     .to = step_in(fields, "to"),
                     .names = fields.text("names"),
                     .tensors = {},
                     .files = {}};
  if (!is_base(record.base)) fields.refuse("base", "a base is 16 hexadecimal digits");
  if (fields.has("from")) {
    record.from = step_in(fields, "from");
    if (*record.from >= record.to) fields.refuse("from", "a patch leads to a later step");
  }
  const JsonFields tensors = fields.object("tensors");
  for (const auto& [name, value] : document["tensors"].items())
    record.tensors.push_back(tensor_in(name, JsonFields(value, source, "tensors." + name)));
  std::set<std::string> paths;
  for (size_t i = 0; i < fields.array("files").size(); ++i) {
    const JsonFields file = fields.element("files", i);
    record.files.push_back(file_in(file));
    if (!paths.insert(record.files.back().path).second)
      file.refuse("path", "a file is listed once");
  }
  return record;
}

PatchRecord read_patch_record(const std::string& directory) {
  const std::string path = concat(directory, "/", kPatchRecordName);
  FSDP_CHECK(path_exists(path), directory, " is no patch: it has no ", kPatchRecordName,
             "; give the directory of a patch, such as ", patch_name(100, 102));
  return parse_patch_record(read_text_file(path, kMaxRecordTextBytes), path);
}

std::string patch_name(std::optional<int64_t> from, int64_t to) {
  const auto digits = [](int64_t step) {
    char text[24];
    std::snprintf(text, sizeof text, "%08lld", static_cast<long long>(step));
    return std::string(text);
  };
  return concat(kPatchPrefix, from ? digits(*from) : "full", "-", digits(to));
}

std::string patch_text(const PatchRecord& record) {
  return concat(record.from ? concat("step ", *record.from, " to ", record.to)
                            : concat("everything of step ", record.to),
                " of base ", record.base);
}

std::vector<std::string> patches_in(const std::string& directory) {
  std::vector<std::tuple<int64_t, int64_t, std::string>> found;
  for (const std::string& name : names_in(directory))
    if (const auto steps = steps_in(name))
      found.emplace_back(steps->second, steps->first, concat(directory, "/", name));
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  for (auto& [to, from, path] : found) paths.push_back(std::move(path));
  return paths;
}

int64_t last_step_of(const std::string& path) {
  const auto steps = steps_in(file_name_of(path));
  FSDP_ASSERT(steps.has_value(), path);
  return steps->second;
}

void remove_patch_leftovers(const std::string& directory) {
  for (const std::string& name : names_in(directory))
    if (name.starts_with(concat(".", kPatchPrefix)) && name.ends_with(".tmp"))
      remove_tree(concat(directory, "/", name));
}

}  // namespace fsdp
