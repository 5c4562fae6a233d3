#include "fsdp/checkpoint/format/manifest.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"

namespace fsdp {

// --- text, paths and checksum --------------------------------------------------------------------

namespace {

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::string_view kEnd = "\n}\n";
// Unique: line breaks in strings are escaped, and fields of inner objects are indented further.
constexpr std::string_view kField = ",\n \"crc32c\": ";

// Everything except the checksum and the end.
std::string_view body_of(std::string_view text) {
  return text.substr(0, std::min(text.rfind(kField), text.size() - kEnd.size()));
}

std::string end_of(std::string_view body) {
  const uint32_t checksum =
      crc32c(std::as_bytes(std::span(kEnd)), crc32c(std::as_bytes(std::span(body))));
  return concat(kField, checksum, kEnd);
}

}  // namespace

std::string base64(std::string_view bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t length = std::min<size_t>(3, bytes.size() - i);
    uint32_t three = 0;
    for (size_t k = 0; k < 3; ++k)
      three = three << 8 | (k < length ? static_cast<unsigned char>(bytes[i + k]) : 0U);
    for (size_t k = 0; k < 4; ++k)
      text.push_back(k <= length ? kDigits[three >> (18 - 6 * k) & 63] : '=');
  }
  return text;
}

std::optional<std::string> from_base64(std::string_view text) {
  std::string bytes;
  uint32_t bits = 0;
  int num_bits = 0;
  for (const char c : text.substr(0, text.find('='))) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    num_bits += 6;
    if (num_bits < 8) continue;
    num_bits -= 8;
    bytes.push_back(static_cast<char>(bits >> num_bits & 0xFF));
  }
  // Each value has one text.
  return base64(bytes) == text ? std::optional(bytes) : std::nullopt;
}

bool is_plain_name(std::string_view name) {
  if (name.empty() || name == "." || name == "..") return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F && c != '\\' && c != '/';
  });
}

bool is_plain_path(std::string_view path) {
  for (;;) {
    const size_t end = path.find('/');
    if (!is_plain_name(path.substr(0, end))) return false;
    if (end == std::string_view::npos) return true;
    path.remove_prefix(end + 1);
  }
}

std::string with_checksum(std::string_view text) {
  FSDP_ASSERT(text.ends_with(kEnd), "a manifest ends otherwise");
  const std::string_view body = body_of(text);
  return std::string(body) + end_of(body);
}

ManifestChecksum checksum_in(std::string_view text) {
  if (text.find(kField) == std::string_view::npos) return ManifestChecksum::kAbsent;
  const std::string_view body = body_of(text);
  return text.substr(body.size()) == end_of(body) ? ManifestChecksum::kRight
                                                  : ManifestChecksum::kWrong;
}

// --- fields --------------------------------------------------------------------------------------

namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr const char* kFormat = "fsdp.cpp checkpoint";
constexpr const char* kRankFormat = "fsdp.cpp checkpoint rank";

// --- writing -----------------------------------------------------------------------------------

// Puts small objects on a line each, because people read manifests, too.
std::string document_text(const OrderedJson& document, int indent = 1) {
  try {
    return document.dump(indent) + "\n";
  } catch (const Json::exception& error) {
    throw UsageError(
        concat("a name or text of the checkpoint is not UTF-8 (", error.what(), "); use text"));
  }
}

OrderedJson json_of(const std::vector<StoredTensor>& tensors) {
  OrderedJson list = OrderedJson::array();
  for (const StoredTensor& tensor : tensors)
    list.push_back(
        {{"name", tensor.name}, {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}});
  return list;
}

OrderedJson json_of(const GroupRecord& group) {
  OrderedJson members = OrderedJson::array();
  for (const GroupRecord::Member& member : group.members)
    members.push_back({{"name", member.name},
                       {"aliases", member.aliases},
                       {"shape", member.shape},
                       {"flat", {member.flat.begin, member.flat.end}}});
  return {{"dtype", name_of(group.dtype)},
          {"trainable", group.is_trainable},
          {"granularity", group.granularity},
          {"padded_numel", group.padded_numel},
          {"members", std::move(members)}};
}

OrderedJson json_of(const OptimizerRecord& optimizer) {
  return {{"name", optimizer.name},
          {"moments", optimizer.moments},
          {"step", optimizer.step},
          {"skipped", optimizer.skipped},
          {"loss_scale", optimizer.loss_scale},
          {"good_steps", optimizer.good_steps},
          {"settings", optimizer.settings},
          {"late_updates", optimizer.late_updates}};
}

// --- reading -----------------------------------------------------------------------------------

void check_format(const JsonFields& fields, const char* format) {
  if (fields.text("format") != format)
    fields.refuse("format", concat("a checkpoint of fsdp.cpp has '", format, "'"));
  if (fields.integer("version") > kCheckpointVersion)
    fields.refuse("version", concat("this fsdp.cpp reads versions up to ", kCheckpointVersion,
                                    "; use the one that wrote it, or a newer one"));
  if (fields.integer("version") < 1) fields.refuse("version", "versions count from 1");
}

// Called after check_format(); a checksum that exists has been compared already.
void check_has_checksum(const JsonFields& fields, std::string_view json) {
  const bool is_old = fields.integer("version") < 2;
  const bool is_there = checksum_in(json) != ManifestChecksum::kAbsent;
  if (is_there != is_old && fields.has("crc32c") == is_there) return;
  fields.refuse("crc32c", concat("a manifest of version ", fields.integer("version"),
                                 is_old ? " has none" : " ends with a line that has it",
                                 "; it was changed, so use another checkpoint"));
}

int64_t count(const JsonFields& fields, const char* field, int64_t minimum = 0) {
  const int64_t value = fields.integer(field);
  if (value < minimum) fields.refuse(field, concat("it must be at least ", minimum));
  return value;
}

uint32_t checksum(int64_t value, const JsonFields& fields, const char* field) {
  if (value < 0 || value > std::numeric_limits<uint32_t>::max())
    fields.refuse(field, "checksums are whole numbers of 32 bits");
  return static_cast<uint32_t>(value);
}

std::string with_digits(int64_t number, size_t count) {
  const std::string digits = std::to_string(number);
  return std::string(count - std::min(count, digits.size()), '0') + digits;
}

DType dtype(const JsonFields& fields) {
  const std::optional<DType> value = parse_dtype(fields.text("dtype"));
  if (!value) fields.refuse("dtype", "it is not a dtype that is known here");
  return *value;
}

std::vector<int64_t> numbers(const JsonFields& fields, const char* field) {
  std::vector<int64_t> values;
  for (const Json& value : fields.array(field)) {
    if (!value.is_number_unsigned() ||
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      fields.refuse(field, "these are whole numbers from 0 up");
    values.push_back(value.get<int64_t>());
  }
  return values;
}

std::vector<std::string> texts(const JsonFields& fields, const char* field) {
  std::vector<std::string> values;
  for (const Json& value : fields.array(field)) {
    if (!value.is_string()) fields.refuse(field, "it must be a list of strings");
    values.push_back(value.get<std::string>());
  }
  return values;
}

// Calls body with each object of a list.
template <typename Body>
void for_each(const JsonFields& fields, const char* field, const Body& body) {
  const size_t length = fields.array(field).size();
  for (size_t i = 0; i < length; ++i) body(fields.element(field, i));
}

class Once {
 public:
  explicit Once(const char* field) : field_(field) {}
  void add(const JsonFields& fields, const std::string& value) {
    if (!seen_.insert(value).second) fields.refuse(field_, "it is there twice");
  }

 private:
  const char* field_;
  std::set<std::string> seen_;
};

std::vector<StoredTensor> read_tensors(const JsonFields& fields, const char* field) {
  std::vector<StoredTensor> tensors;
  Once once("name");
  for_each(fields, field, [&](const JsonFields& each) {
    once.add(each, each.text("name"));
    tensors.push_back({each.text("name"), dtype(each), stored_shape(each)});
  });
  return tensors;
}

GroupRecord read_group(const JsonFields& fields) {
  GroupRecord group{.dtype = dtype(fields),
                    .is_trainable = fields.boolean_or("trainable", true),
                    .granularity = fields.text("granularity"),
                    .padded_numel = count(fields, "padded_numel"),
                    .members = {}};
  for_each(fields, "members", [&](const JsonFields& each) {
    GroupRecord::Member member{.name = each.text("name"),
                               .aliases = texts(each, "aliases"),
                               .shape = stored_shape(each),
                               .flat = {}};
    const std::vector<int64_t> flat = numbers(each, "flat");
    if (flat.size() != 2 || flat[0] > flat[1]) each.refuse("flat", "it must be [begin, end]");
    member.flat = {flat[0], flat[1]};
    group.members.push_back(std::move(member));
  });
  return group;
}

OptimizerRecord read_optimizer(const JsonFields& fields) {
  OptimizerRecord optimizer{.name = fields.text("name"),
                            .moments = texts(fields, "moments"),
                            .step = stored_steps(fields, "step"),
                            .skipped = stored_steps(fields, "skipped"),
                            .loss_scale = fields.number_or("loss_scale", 0.0),
                            .good_steps = stored_steps(fields, "good_steps"),
                            .settings = fields.text_or("settings", "")};
  if (!(optimizer.loss_scale > 0.0)) fields.refuse("loss_scale", "it must be a number above 0");
  if (!fields.has("late_updates")) return optimizer;  // an older checkpoint
  const JsonFields late = fields.object("late_updates");
  for (const std::string& parameter : late.keys()) {
    const int64_t updates = stored_steps(late, parameter.c_str());
    if (updates > optimizer.step)
      late.refuse(parameter, "a parameter has no more updates than its optimizer");
    optimizer.late_updates[parameter] = updates;
  }
  return optimizer;
}

}  // namespace

nlohmann::ordered_json json_of(std::span<const StoredFile> files) {
  OrderedJson list = OrderedJson::array();
  for (const StoredFile& file : files)
    list.push_back({{"path", file.path}, {"bytes", file.bytes}, {"crc32c", file.crc32c}});
  return list;
}

std::vector<StoredFile> stored_files(const JsonFields& fields) {
  std::vector<StoredFile> files;
  Once once("path");
  for_each(fields, "files", [&](const JsonFields& each) {
    once.add(each, each.text("path"));
    files.push_back({stored_path(each), count(each, "bytes"),
                     checksum(each.integer("crc32c"), each, "crc32c")});
  });
  return files;
}

std::string stored_path(const JsonFields& fields) {
  std::string value = fields.text("path");
  if (!is_plain_path(value))
    fields.refuse(
        "path", "it must be a plain path below the checkpoint, such as model/00000-0.safetensors");
  return value;
}

int64_t stored_steps(const JsonFields& fields, const char* field) {
  const int64_t value = count(fields, field);
  if (value > kMaxStoredSteps) fields.refuse(field, "no run has so many steps");
  return value;
}

std::vector<int64_t> stored_shape(const JsonFields& fields) {
  std::vector<int64_t> values = numbers(fields, "shape");
  const bool is_empty = std::find(values.begin(), values.end(), 0) != values.end();
  try {
    // Counts 8 bytes per element, the widest, so that later products cannot overflow.
    int64_t bytes = is_empty ? 0 : 8;
    for (const int64_t value : values) bytes = is_empty ? 0 : checked_mul(bytes, value);
  } catch (const Error&) {
    fields.refuse("shape", "no tensor has so many elements");
  }
  return values;
}

std::string to_json(const Manifest& manifest) {
  OrderedJson units = OrderedJson::array();
  for (const UnitRecord& unit : manifest.units) {
    OrderedJson groups = OrderedJson::array();
    for (const GroupRecord& group : unit.groups) groups.push_back(json_of(group));
    units.push_back({{"name", unit.name}, {"groups", std::move(groups)}});
  }
  return with_checksum(
      document_text({{"format", kFormat},
                     {"version", kCheckpointVersion},
                     {"step", manifest.step},
                     {"mesh", {{"outer", manifest.mesh.outer}, {"inner", manifest.mesh.inner}}},
                     {"sum_group", manifest.sum_group},
                     {"strategy", manifest.strategy},
                     {"precision", manifest.precision},
                     {"schedule", manifest.schedule},
                     {"optimizer", json_of(manifest.optimizer)},
                     {"units", std::move(units)},
                     {"model", json_of(manifest.model)},
                     {"moments", json_of(manifest.moments)},
                     {"files", json_of(manifest.files)}}));
}

Manifest parse_manifest(std::string_view json, const std::string& source) {
  // Comes first: a changed digit of the version would be reported as a newer version.
  FSDP_CHECK(checksum_in(json) != ManifestChecksum::kWrong, source,
             " is not what was written; it is damaged, so use another checkpoint");
  const Json document = parse_json(json, source);
  const JsonFields fields(document, source, "");
  check_format(fields, kFormat);
  check_has_checksum(fields, json);
  Manifest manifest;
  manifest.step = stored_steps(fields, "step");
  const JsonFields mesh = fields.object("mesh");
  manifest.mesh = {.outer = count(mesh, "outer", 1), .inner = count(mesh, "inner", 1)};
  // More ranks than any machine has would overflow products of these numbers.
  if (manifest.mesh.outer > INT32_MAX) mesh.refuse("outer", "no world has so many ranks");
  if (manifest.mesh.inner > INT32_MAX) mesh.refuse("inner", "no world has so many ranks");
  if (fields.has("sum_group")) manifest.sum_group = count(fields, "sum_group", 0);
  manifest.strategy = fields.text("strategy");
  manifest.precision = fields.text("precision");
  manifest.schedule = fields.text("schedule");
  manifest.optimizer = read_optimizer(fields.object("optimizer"));
  for_each(fields, "units", [&](const JsonFields& each) {
    UnitRecord& unit = manifest.units.emplace_back();
    unit.name = each.text("name");
    for_each(each, "groups",
             [&](const JsonFields& group) { unit.groups.push_back(read_group(group)); });
  });
  manifest.model = read_tensors(fields, "model");
  manifest.moments = read_tensors(fields, "moments");
  manifest.files = stored_files(fields);
  return manifest;
}

std::string to_json(const RankRecord& record) {
  OrderedJson files = OrderedJson::array();
  for (const RankRecord::File& file : record.files)
    files.push_back({{"path", file.path},
                     {"bytes", file.bytes},
                     {"header_bytes", file.header_bytes},
                     {"header_crc32c", file.header_crc32c},
                     {"blocks", file.blocks}});
  // On one line: a line per block's checksum would be long.
  return document_text({{"format", kRankFormat},
                        {"version", kCheckpointVersion},
                        {"rank", record.rank},
                        {"block_bytes", record.block_bytes},
                        {"files", std::move(files)},
                        {"random_state", base64(record.random_state)},
                        {"data_position", record.data_position}},
                       -1);
}

RankRecord parse_rank_record(std::string_view json, const std::string& source) {
  const Json document = parse_json(json, source);
  const JsonFields fields(document, source, "");
  check_format(fields, kRankFormat);
  RankRecord record;
  record.rank = count(fields, "rank");
  record.block_bytes = count(fields, "block_bytes", 1);
  if (record.block_bytes > kMaxBlockBytes)
    fields.refuse("block_bytes",
                  concat("it must be at most ", kMaxBlockBytes, ": a block is read as a whole"));
  Once once("path");
  for_each(fields, "files", [&](const JsonFields& each) {
    once.add(each, each.text("path"));
    RankRecord::File& file = record.files.emplace_back();
    file.path = stored_path(each);
    file.bytes = count(each, "bytes");
    file.header_bytes = count(each, "header_bytes");
    if (file.header_bytes > file.bytes) each.refuse("header_bytes", "the file is shorter");
    file.header_crc32c = checksum(each.integer("header_crc32c"), each, "header_crc32c");
    for (const int64_t block : numbers(each, "blocks"))
      file.blocks.push_back(checksum(block, each, "blocks"));
    if (static_cast<int64_t>(file.blocks.size()) != ceil_div(file.bytes, record.block_bytes))
      each.refuse("blocks", concat("a file of ", file.bytes, " bytes has one checksum for every ",
                                   record.block_bytes));
  });
  const std::optional<std::string> random = from_base64(fields.text("random_state"));
  if (!random) fields.refuse("random_state", "it must be base64");
  record.random_state = *random;
  record.data_position = fields.text("data_position");
  return record;
}

std::string rank_text(int64_t rank) { return with_digits(rank, 5); }
std::string step_text(int64_t step) { return with_digits(step, 8); }
std::string rank_record_path(int64_t rank) { return concat("ranks/", rank_text(rank), ".json"); }

uint32_t crc32c_of(const RankRecord::File& file, int64_t block_bytes) {
  uint32_t whole = 0;
  int64_t left = file.bytes;
  for (const uint32_t block : file.blocks) {
    const int64_t bytes = std::min(left, block_bytes);
    whole = crc32c_of_joined(whole, block, bytes);
    left -= bytes;
  }
  return whole;
}

StoredFile described(std::string path, std::string_view text) {
  return {std::move(path), static_cast<int64_t>(text.size()),
          crc32c(std::as_bytes(std::span(text)))};
}

void list_files(const RankRecord& record, std::string_view text, std::vector<StoredFile>& files) {
  files.push_back(described(rank_record_path(record.rank), text));
  for (const RankRecord::File& file : record.files)
    files.push_back({file.path, file.bytes, crc32c_of(file, record.block_bytes)});
}

}  // namespace fsdp
