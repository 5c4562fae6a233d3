#include "fsdp/checkpoint/patches/patch_files.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/format/tensor_stream.h"

namespace fsdp {

// --- the record ----------------------------------------------------------------------------------

namespace {

constexpr const char* kPatchFormat = "fsdp patch";
constexpr int64_t kPatchVersion = 1;
constexpr int64_t kMaxRecordTextBytes = int64_t{1} << 30;
constexpr std::string_view kPatchPrefix = "patch-";
constexpr const char* kDamaged = "; the patch is damaged, so fetch it again";

bool is_base(std::string_view text) {
  return text.size() == 16 && std::all_of(text.begin(), text.end(), [](char c) {
           return ('0' <= c && c <= '9') || ('a' <= c && c <= 'f');
         });
}

StoredTensor tensor_in(const std::string& name, const JsonFields& fields) {
  const std::optional<DType> dtype = parse_safetensors_dtype(fields.text("dtype"));
  if (!dtype) fields.refuse("dtype", "it is not a dtype that is known here");
  return {name, *dtype, stored_shape(fields)};
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

}  // namespace

std::string to_json(const PatchRecord& record) {
  using Json = nlohmann::ordered_json;
  Json tensors = Json::object();
  for (const StoredTensor& tensor : record.tensors)
    tensors[tensor.name] = {{"dtype", safetensors_name(tensor.dtype)}, {"shape", tensor.shape}};
  const Json document = {{"format", kPatchFormat},
                         {"version", kPatchVersion},
                         {"base", record.base},
                         {"begun", record.begun},
                         {"from", record.from ? Json(*record.from) : Json()},
                         {"to", record.to},
                         {"names", record.names},
                         {"tensors", std::move(tensors)},
                         {"files", json_of(record.files)}};
  return with_checksum(document.dump(1) + "\n");
}

PatchRecord parse_patch_record(std::string_view json, const std::string& source) {
  FSDP_CHECK(checksum_in(json) == ManifestChecksum::kRight, source, " is not what was written",
             kDamaged);
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
                     .to = stored_steps(fields, "to"),
                     .names = fields.text("names"),
                     .tensors = {},
                     .files = {}};
  if (!is_base(record.base)) fields.refuse("base", "a base is 16 hexadecimal digits");
  if (fields.has("from")) {
    record.from = stored_steps(fields, "from");
    if (*record.from >= record.to) fields.refuse("from", "a patch leads to a later step");
  }
  const JsonFields tensors = fields.object("tensors");
  for (const std::string& name : tensors.keys())
    record.tensors.push_back(tensor_in(name, tensors.object(name.c_str())));
  record.files = stored_files(fields);
  return record;
}

PatchRecord read_patch_record(const std::string& directory) {
  const std::string path = concat(directory, "/", kPatchRecordName);
  FSDP_CHECK(path_exists(path), directory, " is no patch: it has no ", kPatchRecordName,
             "; give the directory of a patch, such as ", patch_name(100, 102));
  return parse_patch_record(read_text_file(path, kMaxRecordTextBytes), path);
}

std::string patch_name(std::optional<int64_t> from, int64_t to) {
  return concat(kPatchPrefix, from ? step_text(*from) : "full", "-", step_text(to));
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

// --- positions -----------------------------------------------------------------------------------

namespace {

template <typename Number>
void decode(std::span<const std::byte> bytes, int64_t numel, const std::string& source,
            std::vector<int64_t>& positions) {
  int64_t next = 0;
  for (size_t i = 0; i < bytes.size(); i += sizeof(Number)) {
    Number number = 0;
    std::memcpy(&number, bytes.data() + i, sizeof(number));
    next += number;
    if (number == largest_skip<Number>()) continue;
    FSDP_CHECK(next < numel, source, ": element ", next, " is beyond the tensor's last one, ",
               numel - 1, kDamaged);
    positions.push_back(next++);
  }
}

}  // namespace

std::vector<int64_t> decode_skips(std::span<const std::byte> bytes, int64_t width, int64_t count,
                                  int64_t numel, const std::string& source) {
  std::vector<int64_t> positions;
  positions.reserve(static_cast<size_t>(count));
  width == 1 ? decode<uint8_t>(bytes, numel, source, positions)
             : decode<uint16_t>(bytes, numel, source, positions);
  FSDP_CHECK(static_cast<int64_t>(positions.size()) == count, source, ": has ", positions.size(),
             " positions and ", count, " values", kDamaged);
  return positions;
}

// --- files ---------------------------------------------------------------------------------------

namespace {

constexpr std::string_view kValues = "values/";
constexpr std::string_view kSkips = "skips/";
constexpr std::string_view kRanges = "ranges/";
constexpr int64_t kRangeBytes = 2 * sizeof(int64_t);

SafetensorsEntry positions_entry(const StoredChange& change) {
  const auto bytes = static_cast<int64_t>(change.positions.size());
  const std::string& name = change.tensor.name;
  switch (change.form) {
    case PositionForm::kRanges:
      return {
          .name = concat(kRanges, name), .dtype = DType::kInt64, .shape = {bytes / kRangeBytes, 2}};
    case PositionForm::kSkips:
      return {.name = concat(kSkips, name), .dtype = DType::kUInt8, .shape = {bytes}};
    case PositionForm::kWideSkips:
      break;
  }
  return {.name = concat(kSkips, name), .dtype = DType::kUInt8, .shape = {bytes / 2, 2}};
}

std::vector<FlatRange> ranges_of(std::span<const std::byte> bytes, int64_t count, int64_t numel,
                                 const std::string& source) {
  std::vector<FlatRange> ranges(bytes.size() / static_cast<size_t>(kRangeBytes));
  std::memcpy(ranges.data(), bytes.data(), ranges.size() * kRangeBytes);
  int64_t before = -1;
  int64_t sum = 0;
  for (const FlatRange& range : ranges) {
    FSDP_CHECK(range.begin > before && range.end > range.begin && range.end <= numel, source,
               ": the range [", range.begin, ", ", range.end, ") does not fit a tensor of ", numel,
               " elements, of which ranges end at ", before, kDamaged);
    before = range.end;
    sum += range.numel();
  }
  FSDP_CHECK(sum == count, source, ": has ", count, " values for ranges of ", sum, " elements",
             kDamaged);
  return ranges;
}

// One file of a patch, with its header read.
class OpenPatchFile {
 public:
  explicit OpenPatchFile(const std::string& path) : path_(path) {
    const FileReader file(path);
    SafetensorsHeader header =
        parse_safetensors_header(safetensors_header_text(file).substr(8), file.bytes(), path);
    data_begin_ = header.data_begin;
    for (SafetensorsEntry& entry : header.tensors) entries_[entry.name] = std::move(entry);
  }

  const std::string& path() const { return path_; }
  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const SafetensorsEntry* find(const std::string& name) const {
    const auto it = entries_.find(name);
    return it == entries_.end() ? nullptr : &it->second;
  }
  std::vector<std::byte> read(const SafetensorsEntry& entry) const {
    std::vector<std::byte> bytes(static_cast<size_t>(entry.end - entry.begin));
    FileReader(path_).read(data_begin_ + entry.begin, bytes);
    return bytes;
  }

 private:
  const std::string path_;  // not kept open: a patch may have more files than a process may open
  int64_t data_begin_ = 0;
  std::map<std::string, SafetensorsEntry> entries_;
};

// Every list of the file must be one of values or positions of a tensor of the record.
void check_patch_names(const OpenPatchFile& file, const std::set<std::string>& tensors) {
  for (const auto& [key, entry] : file.entries()) {
    const size_t slash = key.find('/') + 1;
    const std::string_view kind = std::string_view(key).substr(0, slash);
    const std::string name = key.substr(slash);
    FSDP_CHECK((kind == kValues || kind == kSkips || kind == kRanges) && tensors.count(name) > 0,
               file.path(), ": '", shown(key), "' is not in ", kPatchRecordName, kDamaged);
    FSDP_CHECK(kind == kValues || file.find(concat(kValues, name)) != nullptr, file.path(), ": '",
               shown(name), "' has positions and no values", kDamaged);
  }
}

// Adds the elements of a change, as ranges.
void add_changed_elements(const PatchChange& change, std::vector<FlatRange>& elements) {
  elements.insert(elements.end(), change.ranges.begin(), change.ranges.end());
  bool is_first = true;
  for (const int64_t position : change.positions)
    if (!std::exchange(is_first, false) && elements.back().end == position)
      ++elements.back().end;
    else
      elements.push_back({position, position + 1});
}

// `elements` of all files.
void check_changed_elements(const std::string& directory, const PatchRecord& record,
                            const StoredTensor& tensor, std::vector<FlatRange> elements) {
  std::sort(elements.begin(), elements.end(),
            [](const FlatRange& a, const FlatRange& b) { return a.begin < b.begin; });
  int64_t end = 0;
  int64_t count = 0;
  for (const FlatRange& range : elements) {
    FSDP_CHECK(range.begin >= end, directory, ": two files have element ", range.begin, " of '",
               tensor.name, "'", kDamaged);
    end = range.end;
    count += range.numel();
  }
  FSDP_CHECK(record.from || count == numel_of(tensor), directory, ": is a full patch and has ",
             count, " of the ", numel_of(tensor), " elements of '", tensor.name, "'", kDamaged);
}

void read_change(const OpenPatchFile& file, const SafetensorsEntry& values,
                 const StoredTensor& tensor, const std::function<void(const PatchChange&)>& body) {
  const std::string source = concat(file.path(), ": '", tensor.name, "'");
  FSDP_CHECK(values.dtype == tensor.dtype && values.shape.size() == 1, source, " has values of ",
             name_of(values.dtype), " ", list_text(values.shape), " for a tensor of ",
             name_of(tensor.dtype), kDamaged);
  const SafetensorsEntry* skips = file.find(concat(kSkips, tensor.name));
  const SafetensorsEntry* ranges = file.find(concat(kRanges, tensor.name));
  FSDP_CHECK((skips != nullptr) != (ranges != nullptr), source,
             " has values and not one list of positions", kDamaged);
  const std::vector<std::byte> value_bytes = file.read(values);
  const std::vector<std::byte> bytes = file.read(skips != nullptr ? *skips : *ranges);
  const int64_t count = values.shape[0];
  PatchChange change{.tensor = tensor, .ranges = {}, .positions = {}, .values = value_bytes};
  std::vector<int64_t> positions;
  if (skips != nullptr) {
    const bool is_narrow = skips->shape.size() == 1;
    FSDP_CHECK(skips->dtype == DType::kUInt8 &&
                   (is_narrow || (skips->shape.size() == 2 && skips->shape[1] == 2)),
               source, " has skips of ", name_of(skips->dtype), " ", list_text(skips->shape),
               kDamaged);
    positions = decode_skips(bytes, is_narrow ? 1 : 2, count, numel_of(tensor), source);
    change.positions = positions;
  } else {
    FSDP_CHECK(ranges->dtype == DType::kInt64 && ranges->shape.size() == 2 && ranges->shape[1] == 2,
               source, " has ranges of ", name_of(ranges->dtype), " ", list_text(ranges->shape),
               kDamaged);
    change.ranges = ranges_of(bytes, count, numel_of(tensor), source);
  }
  if (count > 0) body(change);
}

}  // namespace

StoredFile write_patch_file(const std::string& directory, int64_t rank,
                            std::span<const StoredChange> changes) {
  SafetensorsHeader header;
  for (const StoredChange& change : changes) {
    header.tensors.push_back(positions_entry(change));
    header.tensors.push_back({.name = concat(kValues, change.tensor.name),
                              .dtype = change.tensor.dtype,
                              .shape = {static_cast<int64_t>(change.values.size()) /
                                        element_bytes(change.tensor.dtype)}});
  }
  const std::string name = rank_text(rank) + ".safetensors";
  SafetensorsWriter file(concat(directory, "/", name), std::move(header));
  for (const StoredChange& change : changes) {
    file.write(change.positions);
    file.write(change.values);
  }
  const RankRecord::File written = file.commit(name);
  return {name, written.bytes, crc32c_of(written, kMaxBlockBytes)};
}

void publish_patch(const std::string& temporary, const std::string& path,
                   const PatchRecord& record) {
  write_file_durably(concat(temporary, "/", kPatchRecordName), to_json(record));
  sync_tree(temporary);
  if (!path_exists(path)) return rename_durably(temporary, path);
  const std::string replaced = temporary_name_for(path);
  rename_durably(path, replaced);
  rename_durably(temporary, path);
  remove_tree(replaced);
}

void verify_patch_files(const std::string& directory, const PatchRecord& record) {
  std::vector<std::byte> chunk;
  for (const StoredFile& stored : record.files) {
    const std::string path = concat(directory, "/", stored.path);
    FSDP_CHECK(path_exists(path), path, " is missing", kDamaged);
    const FileReader file(path);
    FSDP_CHECK(file.bytes() == stored.bytes, path, " has ", file.bytes(), " bytes and not ",
               stored.bytes, kDamaged);
    uint32_t checksum = 0;
    for_each_chunk(stored.bytes, 1, [&](FlatRange range) {
      chunk.resize(static_cast<size_t>(range.numel()));
      file.read(range.begin, chunk);
      checksum = crc32c(chunk, checksum);
    });
    FSDP_CHECK(checksum == stored.crc32c, path, " is not what was written", kDamaged);
  }
}

void for_each_change(const std::string& directory, const PatchRecord& record,
                     const std::function<void(const PatchChange& change)>& body) {
  std::set<std::string> names;
  for (const StoredTensor& tensor : record.tensors) names.insert(tensor.name);
  std::vector<OpenPatchFile> files;
  for (const StoredFile& stored : record.files) {
    files.emplace_back(concat(directory, "/", stored.path));
    check_patch_names(files.back(), names);
  }
  for (const StoredTensor& tensor : record.tensors) {
    std::vector<FlatRange> elements;
    for (const OpenPatchFile& file : files)
      if (const SafetensorsEntry* values = file.find(concat(kValues, tensor.name)))
        read_change(file, *values, tensor, [&](const PatchChange& change) {
          add_changed_elements(change, elements);
          body(change);
        });
    check_changed_elements(directory, record, tensor, std::move(elements));
  }
}

}  // namespace fsdp
