#include "fsdp/checkpoint/format/safetensors_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"

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
    const std::optional<DType> dtype = parse_safetensors_dtype(text);
    FSDP_CHECK(dtype.has_value(), what(), " has dtype ", shown(text),
               ", which is not supported here");
    return *dtype;
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

std::optional<DType> parse_safetensors_dtype(std::string_view name) {
  for (const auto& [known, dtype] : kDTypes)
    if (known == name) return dtype;
  return std::nullopt;
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

std::string safetensors_header_text(const FileReader& file) {
  std::string text(static_cast<size_t>(std::min(kLengthBytes, file.bytes())), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  const int64_t bytes = safetensors_header_bytes(text, file.bytes(), file.path());
  text.resize(static_cast<size_t>(kLengthBytes + bytes));
  file.read(kLengthBytes, std::as_writable_bytes(std::span(text).subspan(kLengthBytes)));
  return text;
}

// --- writing -------------------------------------------------------------------------------------

SafetensorsWriter::SafetensorsWriter(const std::string& path, SafetensorsHeader header,
                                     int64_t block_bytes)
    : file_(path), block_bytes_(block_bytes) {
  const std::string text = write_safetensors_header(header);
  record_.header_bytes = static_cast<int64_t>(text.size());
  record_.header_crc32c = crc32c(std::as_bytes(std::span(text)));
  record_.bytes = header.data_begin + (header.tensors.empty() ? 0 : header.tensors.back().end);
  write(std::as_bytes(std::span(text)));
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  // So few at a time that they are still in a core's cache for the checksum.
  constexpr int64_t kPartBytes = int64_t{256} << 10;
  while (!bytes.empty()) {
    const int64_t most = std::min(block_bytes_ - block_filled_, kPartBytes);
    const std::span<const std::byte> part =
        bytes.first(std::min(bytes.size(), static_cast<size_t>(most)));
    file_.write(part);
    block_ = crc32c(part, block_);
    block_filled_ += static_cast<int64_t>(part.size());
    bytes = bytes.subspan(part.size());
    if (block_filled_ == block_bytes_) end_block();
  }
}

void SafetensorsWriter::end_block() {
  record_.blocks.push_back(std::exchange(block_, 0));
  block_filled_ = 0;
}

RankRecord::File SafetensorsWriter::commit(std::string name) {
  FSDP_ASSERT(is_full(), name, " has ", file_.bytes(), " bytes of ", record_.bytes);
  if (block_filled_ > 0) end_block();
  file_.commit();
  record_.path = std::move(name);
  return std::move(record_);
}

// --- a rank's files ------------------------------------------------------------------------------

namespace {

// Collects small pieces into one write; larger ones are written from their memory.
class PieceBuffer {
 public:
  // Its size is a multiple of the widest element, so that all elements are aligned in it. A larger
  // chunk than the largest gains nothing.
  explicit PieceBuffer(int64_t chunk_bytes)
      : chunk_(static_cast<size_t>(round_up(std::min(chunk_bytes, int64_t{1} << 30), 8))) {}

  void append(const Piece& piece, SafetensorsWriter& file) {
    const int64_t width = element_bytes(piece.dtype);
    const int64_t numel = piece.box.numel();
    if (numel * width >= kLargeBytes && append_in_place(piece, file)) return;
    for (int64_t begin = 0; begin < numel;) {
      if (room() < width) flush(file);
      const int64_t end = std::min(begin + room() / width, numel);
      piece.read({begin, end}, chunk_.data() + used_);
      used_ += static_cast<size_t>((end - begin) * width);
      begin = end;
    }
  }

  // Gives everything to the system; commit() waits for the disk.
  void flush(SafetensorsWriter& file) {
    file.write(std::span(chunk_).first(std::exchange(used_, 0)));
  }

 private:
  static constexpr int64_t kLargeBytes = int64_t{1} << 20;

  int64_t room() const { return static_cast<int64_t>(chunk_.size() - used_); }

  bool append_in_place(const Piece& piece, SafetensorsWriter& file) {
    const FlatRange all{0, piece.box.numel()};
    const std::byte* const bytes = piece.in_memory ? piece.in_memory(all) : nullptr;
    if (bytes == nullptr) return false;
    flush(file);
    file.write({bytes, static_cast<size_t>(all.numel() * element_bytes(piece.dtype))});
    return true;
  }

  std::vector<std::byte> chunk_;
  size_t used_ = 0;
};

SafetensorsHeader header_of(std::span<const Piece* const> pieces) {
  SafetensorsHeader header;
  nlohmann::json offsets = nlohmann::json::object();
  for (const Piece* piece : pieces) {
    header.tensors.push_back({piece->name, piece->dtype, piece->box.sizes});
    offsets[piece->name] = {{"saved_offsets", piece->box.offsets}};
  }
  header.metadata = {{"format", "pt"},  // loaders of other libraries ask for it
                     {kShardingInfo, offsets.dump()}};
  return header;
}

// The pieces of each file, wide elements first, so that all are aligned in the file and in the
// chunk.
std::vector<std::vector<const Piece*>> files_of(std::span<const Piece> pieces) {
  std::map<std::string, size_t> boxes_of;  // how many of each tensor so far
  std::vector<std::vector<const Piece*>> files;
  for (const Piece& piece : pieces) {
    const size_t file = boxes_of[piece.name]++;
    if (file == files.size()) files.emplace_back();
    files[file].push_back(&piece);
  }
  for (std::vector<const Piece*>& file : files)
    std::stable_sort(file.begin(), file.end(), [](const Piece* a, const Piece* b) {
      return element_bytes(a->dtype) > element_bytes(b->dtype);
    });
  return files;
}

}  // namespace

void WriteOptions::validate() const {
  if (chunk_bytes < 1)
    throw UsageError(concat("chunk_bytes is ", chunk_bytes, "; it must be at least 1"));
  if (block_bytes < 1 || block_bytes > kMaxBlockBytes)
    throw UsageError(
        concat("block_bytes is ", block_bytes, "; it must be from 1 to ", kMaxBlockBytes));
}

std::vector<RankRecord::File> write_pieces(const std::string& directory, int64_t rank,
                                           const std::vector<FolderPieces>& folders,
                                           const WriteOptions& options) {
  options.validate();
  PieceBuffer buffer(options.chunk_bytes);
  std::vector<std::string> names;
  std::deque<SafetensorsWriter> files;
  for (const FolderPieces& folder : folders) {
    make_directories(concat(directory, "/", folder.folder));
    const std::vector<std::vector<const Piece*>> contents = files_of(folder.pieces);
    for (size_t i = 0; i < contents.size(); ++i) {
      names.push_back(concat(folder.folder, "/", rank_text(rank), "-", i, ".safetensors"));
      SafetensorsWriter& file = files.emplace_back(concat(directory, "/", names.back()),
                                                   header_of(contents[i]), options.block_bytes);
      for (const Piece* piece : contents[i]) buffer.append(*piece, file);
      buffer.flush(file);
    }
  }
  // Waits once at the end instead of once per file: the disk has worked since the first write.
  std::vector<RankRecord::File> written;
  for (size_t i = 0; i < files.size(); ++i) written.push_back(files[i].commit(names[i]));
  return written;
}

}  // namespace fsdp
