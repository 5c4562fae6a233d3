#include "fsdp/checkpoint/patches/patch_files.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/utf8.h"
#include "fsdp/checkpoint/format/safetensors_header.h"
#include "fsdp/checkpoint/format/tensor_stream.h"

namespace fsdp {

namespace {

constexpr std::string_view kValues = "values/";
constexpr std::string_view kSkips = "skips/";
constexpr std::string_view kRanges = "ranges/";
constexpr int64_t kRangeBytes = 2 * sizeof(int64_t);

// --- writing -------------------------------------------------------------------------------------

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

// Writes a file and adds up its checksum.
class SummedFile {
 public:
  explicit SummedFile(std::string path) : file_(std::move(path)) {}

  void write(std::span<const std::byte> bytes) {
    file_.write(bytes);
    checksum_ = crc32c(bytes, checksum_);
  }
  StoredFile commit(std::string name) {
    file_.commit();
    return {std::move(name), file_.bytes(), checksum_};
  }

 private:
  FileWriter file_;
  uint32_t checksum_ = 0;
};

// --- reading -------------------------------------------------------------------------------------

constexpr const char* kDamaged = "; the patch is damaged, so fetch it again";

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
    constexpr size_t kFirstBytes = 8;
    std::string text(kFirstBytes, '\0');
    FSDP_CHECK(file.bytes() >= static_cast<int64_t>(kFirstBytes), path, " has only ", file.bytes(),
               " bytes", kDamaged);
    file.read(0, std::as_writable_bytes(std::span(text)));
    text.resize(static_cast<size_t>(safetensors_header_bytes(text, file.bytes(), path)));
    file.read(kFirstBytes, std::as_writable_bytes(std::span(text)));
    SafetensorsHeader header = parse_safetensors_header(text, file.bytes(), path);
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
  const std::string text = write_safetensors_header(header);
  SummedFile file(concat(directory, "/", name));
  file.write(std::as_bytes(std::span(text)));
  for (const StoredChange& change : changes) {
    file.write(change.positions);
    file.write(change.values);
  }
  return file.commit(name);
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
