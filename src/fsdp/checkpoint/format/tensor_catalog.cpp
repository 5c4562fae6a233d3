#include "fsdp/checkpoint/format/tensor_catalog.h"

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/optim/kernels/thread_team.h"

namespace fsdp {

namespace {

// A longer manifest or index is refused.
constexpr int64_t kMaxJsonBytes = int64_t{1} << 30;
constexpr const char* kSuffix = ".safetensors";

SafetensorsHeader read_safetensors_header(const CheckedFile& file) {
  const FileReader reader(file.path);
  FSDP_CHECK(reader.bytes() == file.bytes, file.path, " has ", reader.bytes(), " bytes instead of ",
             file.bytes, "; it is ", reader.bytes() < file.bytes ? "truncated" : "damaged",
             ", so use another checkpoint");
  const std::string text = safetensors_header_text(reader);
  FSDP_CHECK(
      file.block_bytes == 0 || (static_cast<int64_t>(text.size()) == file.header_bytes &&
                                crc32c(std::as_bytes(std::span(text))) == file.header_crc32c),
      file.path,
      ": the header is not what was written; the file is damaged, so use another checkpoint");
  return parse_safetensors_header(std::string_view(text).substr(8), file.bytes, file.path);
}

// Where each tensor of a file begins in the whole tensor; empty: files hold whole tensors.
std::map<std::string, std::vector<int64_t>> saved_offsets(const SafetensorsHeader& header,
                                                          const std::string& source) {
  std::map<std::string, std::vector<int64_t>> offsets;
  const auto found = header.metadata.find(kShardingInfo);
  if (found == header.metadata.end()) return offsets;
  const std::string place = concat(source, ": ", kShardingInfo);
  const nlohmann::json document = parse_json(found->second, place);
  FSDP_CHECK(document.is_object(), place, " is not a JSON object");
  for (const auto& [name, value] : document.items()) {
    const auto is_offset = [](const nlohmann::json& item) {
      return item.is_number_unsigned() && item.get<uint64_t>() <= uint64_t{INT64_MAX} / 2;
    };
    const auto items = value.is_object() ? value.find("saved_offsets") : value.end();
    FSDP_CHECK(items != value.end() && items->is_array() && std::ranges::all_of(*items, is_offset),
               place, ": ", shown(name), " has no saved_offsets that are whole numbers from 0 up");
    offsets.emplace(name, items->get<std::vector<int64_t>>());
  }
  return offsets;
}

// The box of a tensor that a file holds.
Box box_in(const SafetensorsEntry& entry, const SafetensorsHeader& header,
           const std::map<std::string, std::vector<int64_t>>& offsets, const std::string& source) {
  Box box{std::vector<int64_t>(entry.shape.size(), 0), entry.shape};
  if (header.metadata.count(kShardingInfo) == 0) return box;
  const auto found = offsets.find(entry.name);
  FSDP_CHECK(found != offsets.end(), source, ": tensor '", shown(entry.name), "' is missing in ",
             kShardingInfo);
  FSDP_CHECK(found->second.size() == entry.shape.size(), source, ": tensor '", shown(entry.name),
             "' has ", entry.shape.size(), " dims, but ", found->second.size(), " saved_offsets");
  box.offsets = found->second;
  for (size_t i = 0; i < box.sizes.size(); ++i)
    FSDP_CHECK(box.offsets[i] <= INT64_MAX - box.sizes[i], source, ": tensor '", shown(entry.name),
               "' has a part from ", box.offsets[i], " on that is ", box.sizes[i],
               " long: no tensor is so large");
  return box;
}

// Compares only boxes that overlap along one dim, sorted by it: the dim with the most different
// beginnings.
bool any_overlap(std::vector<const Box*> boxes) {
  std::erase_if(boxes, [](const Box* box) { return box->numel() == 0; });
  if (boxes.size() < 2) return false;
  const size_t num_dims = boxes.front()->sizes.size();
  if (num_dims == 0) return true;
  size_t dim = 0;
  size_t most = 0;
  for (size_t i = 0; i < num_dims; ++i) {
    std::set<int64_t> begins;
    for (const Box* box : boxes) begins.insert(box->offsets[i]);
    if (begins.size() > most) dim = i;
    most = std::max(most, begins.size());
  }
  std::sort(boxes.begin(), boxes.end(),
            [&](const Box* a, const Box* b) { return a->offsets[dim] < b->offsets[dim]; });
  for (size_t i = 0; i < boxes.size(); ++i) {
    const int64_t end = boxes[i]->offsets[dim] + boxes[i]->sizes[dim];
    for (size_t k = i + 1; k < boxes.size() && boxes[k]->offsets[dim] < end; ++k)
      if (intersect(*boxes[i], *boxes[k]).numel() > 0) return true;
  }
  return false;
}

// nullopt: the number overflows. Without a manifest, a file may claim any shape.
std::optional<int64_t> countable_numel(const std::vector<int64_t>& shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t numel = 1;
  for (const int64_t size : shape)
    if (__builtin_mul_overflow(numel, size, &numel)) return std::nullopt;
  return numel;
}

// The boxes of a tensor must be exactly the tensor: as many elements, all inside, none twice.
std::optional<std::string> cover_fault(const CatalogTensor& tensor) {
  std::vector<const Box*> boxes;
  int64_t numel = 0;
  const Box whole{std::vector<int64_t>(tensor.tensor.shape.size(), 0), tensor.tensor.shape};
  for (const StoredBox& stored : tensor.boxes) {
    if (!(intersect(stored.place.box, whole) == stored.place.box) && stored.place.box.numel() > 0)
      return "a part of it lies outside its shape";
    boxes.push_back(&stored.place.box);
    numel = checked_add(numel, stored.place.box.numel());
  }
  const std::optional<int64_t> whole_numel = countable_numel(tensor.tensor.shape);
  if (!whole_numel || numel < *whole_numel)
    return concat("only ", numel, " of its ", whole_numel ? "" : "more than ",
                  whole_numel.value_or(INT64_MAX), " elements are there");
  if (any_overlap(std::move(boxes))) return "two parts of it overlap";
  return std::nullopt;
}

void check_tensors_are_whole(const TensorSet& set, const std::string& source) {
  std::vector<std::string> faults;
  for (const auto& [name, tensor] : set)
    if (const std::optional<std::string> fault = cover_fault(tensor))
      faults.push_back(concat(shown(name), " (", *fault, ")"));
  FSDP_CHECK(faults.empty(), source, ": ", faults.size(),
             " tensors are not complete: ", some_of(faults),
             "; a file is missing or damaged, so use another checkpoint");
}

// Without a manifest, the shape is the extent of all parts.
void grow_shape(CatalogTensor& tensor, const Box& box) {
  std::vector<int64_t>& shape = tensor.tensor.shape;
  for (size_t i = 0; i < shape.size(); ++i)
    shape[i] = std::max(shape[i], box.offsets[i] + box.sizes[i]);
}

void check_against(const std::vector<StoredTensor>& expected, TensorSet& set,
                   const std::string& source) {
  std::vector<std::string> missing;
  std::vector<std::string> different;
  std::set<std::string> names;
  for (const StoredTensor& tensor : expected) {
    names.insert(tensor.name);
    const auto found = set.find(tensor.name);
    if (found == set.end()) {
      missing.push_back(tensor.name);
    } else if (found->second.tensor.dtype != tensor.dtype ||
               found->second.tensor.shape.size() != tensor.shape.size()) {
      different.push_back(tensor.name);
    } else {
      found->second.tensor.shape = tensor.shape;
    }
  }
  std::vector<std::string> extra;
  for (const auto& [name, ignored] : set)
    if (names.count(name) == 0) extra.push_back(name);
  FSDP_CHECK(missing.empty(), source,
             ": the files lack tensors of the manifest: ", some_of(missing));
  FSDP_CHECK(different.empty(), source,
             ": tensors have another dtype or number of dims than the manifest says: ",
             some_of(different));
  FSDP_CHECK(extra.empty(), source,
             ": the files hold tensors the manifest does not know: ", some_of(extra));
}

// The files of a directory that other tools wrote: those in an index, or all.
std::vector<std::string> plain_files(const std::string& directory) {
  std::set<std::string> names;
  const std::vector<std::string> all = names_in(directory);
  for (const std::string& name : all) {
    // Another format may have its index here, too: pytorch_model.bin.index.json.
    if (!name.ends_with(concat(kSuffix, ".index.json"))) continue;
    const std::string source = concat(directory, "/", name);
    const nlohmann::json index = parse_json(read_text_file(source, kMaxJsonBytes), source);
    const auto map = index.find("weight_map");
    FSDP_CHECK(map != index.end() && map->is_object(), source, " has no weight_map");
    for (const auto& [tensor, file] : map->items()) {
      FSDP_CHECK(file.is_string() && is_plain_name(file.get<std::string>()), source,
                 ": the file of '", shown(tensor), "' is no plain file name");
      names.insert(file.get<std::string>());
    }
  }
  if (names.empty())
    for (const std::string& name : all)
      if (name.ends_with(kSuffix)) names.insert(name);
  std::vector<std::string> paths;
  for (const std::string& name : names) paths.push_back(concat(directory, "/", name));
  return paths;
}

}  // namespace

// A file's header, read.
struct TensorCatalog::ReadHeader {
  SafetensorsHeader header;
  std::vector<Box> boxes;  // of its tensors in the whole ones
};

TensorCatalog::ReadHeader TensorCatalog::read_header(const CheckedFile& file) {
  ReadHeader read{.header = read_safetensors_header(file), .boxes = {}};
  const auto offsets = saved_offsets(read.header, file.path);
  for (const SafetensorsEntry& entry : read.header.tensors)
    read.boxes.push_back(box_in(entry, read.header, offsets, file.path));
  return read;
}

TensorCatalog::TensorCatalog(const std::string& path) : path_(path) {
  FSDP_CHECK(path_exists(path), path,
             " does not exist; give a checkpoint, a run's "
             "directory or a safetensors file");
  if (path_exists(path + "/manifest.json")) {
    open_ours();
  } else {
    open_plain();
  }
}

// Thousands of ranks wrote thousands of headers, which are read side by side, so many at a time.
void TensorCatalog::add_files(std::vector<FileOfSet> files) {
  constexpr size_t kAtATime = 256;
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  ThreadTeam team(std::clamp<int64_t>(std::ssize(files), 1, std::min<int64_t>(cores, 16)));
  for (size_t begin = 0; begin < files.size(); begin += kAtATime) {
    const size_t count = std::min(kAtATime, files.size() - begin);
    std::vector<ReadHeader> headers(count);
    std::vector<std::exception_ptr> errors(count);
    team.run(static_cast<int64_t>(count), [&](int64_t index) {
      const auto i = static_cast<size_t>(index);
      try {
        headers[i] = read_header(files[begin + i].file);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
    for (size_t i = 0; i < count; ++i) {
      if (errors[i]) std::rethrow_exception(errors[i]);
      add_file(std::move(files[begin + i].file), headers[i], *files[begin + i].set);
    }
  }
}

void TensorCatalog::add_file(CheckedFile file, const ReadHeader& read, TensorSet& set) {
  const size_t index = files_.size();
  for (size_t i = 0; i < read.boxes.size(); ++i) {
    const SafetensorsEntry& entry = read.header.tensors[i];
    const auto [found, is_new] = set.try_emplace(entry.name);
    CatalogTensor& tensor = found->second;
    if (is_new)
      tensor.tensor = {entry.name, entry.dtype, std::vector<int64_t>(entry.shape.size(), 0)};
    FSDP_CHECK(tensor.tensor.dtype == entry.dtype, file.path, ": tensor '", shown(entry.name),
               "' is ", name_of(entry.dtype), " here and ", name_of(tensor.tensor.dtype),
               " elsewhere");
    FSDP_CHECK(tensor.tensor.shape.size() == entry.shape.size(), file.path, ": tensor '",
               shown(entry.name), "' has ", entry.shape.size(), " dims here and ",
               tensor.tensor.shape.size(), " elsewhere");
    grow_shape(tensor, read.boxes[i]);
    tensor.boxes.push_back({packed(read.boxes[i], 0), index, read.header.data_begin + entry.begin});
  }
  files_.push_back(std::move(file));
}

void TensorCatalog::open_ours() {
  const std::string source = path_ + "/manifest.json";
  manifest_ = read_manifest(path_);
  std::map<std::string, const StoredFile*> known;
  for (const StoredFile& file : manifest_->files) known[file.path] = &file;
  std::set<std::string> written = {};
  std::vector<FileOfSet> files;
  for (int64_t rank = 0; rank < manifest_->num_ranks(); ++rank) {
    const std::string name = rank_record_path(rank);
    const std::string record_source = concat(path_, "/", name);
    const auto entry = known.find(name);
    FSDP_CHECK(entry != known.end(), source, ": files lacks ", name, ", what rank ", rank, " of ",
               manifest_->num_ranks(), " wrote");
    const std::string text = read_text_file(record_source, kMaxJsonBytes);
    FSDP_CHECK(described(name, text) == *entry->second, record_source,
               " is not what was written; it is damaged, so use another checkpoint");
    written.insert(name);
    ranks_.push_back(parse_rank_record(text, record_source));
    const RankRecord& record = ranks_.back();
    FSDP_CHECK(record.rank == rank, record_source, ": rank is ", record.rank, "; it must be ",
               rank);
    for (const RankRecord::File& file : record.files) {
      const auto listed = known.find(file.path);
      FSDP_CHECK(listed != known.end() && listed->second->bytes == file.bytes &&
                     listed->second->crc32c == crc32c_of(file, record.block_bytes),
                 record_source, ": ", file.path, " is not described like this by the manifest");
      FSDP_CHECK(written.insert(file.path).second, record_source, ": ", file.path,
                 " was written by another rank, too");
      const bool is_model = file.path.starts_with("model/");
      FSDP_CHECK(is_model || file.path.starts_with("optimizer/"), record_source, ": ", file.path,
                 " is neither in model/ nor in optimizer/");
      files.push_back({{concat(path_, "/", file.path), file.bytes, record.block_bytes,
                        file.header_bytes, file.header_crc32c, file.blocks},
                       is_model ? &model_ : &moments_});
    }
  }
  add_files(std::move(files));
  for (const StoredFile& file : manifest_->files)
    FSDP_CHECK(written.count(file.path) == 1 || is_model_file(file.path), source,
               ": no rank wrote ", file.path);
  check_against(manifest_->model, model_, source);
  check_against(manifest_->moments, moments_, source);
  check_tensors_are_whole(model_, path_);
  check_tensors_are_whole(moments_, path_);
}

void TensorCatalog::open_plain() {
  const bool is_folder = is_directory(path_);
  const std::vector<std::string> paths =
      is_folder ? plain_files(path_) : std::vector<std::string>{path_};
  FSDP_CHECK(!paths.empty(), path_,
             " holds neither a manifest.json nor safetensors files; give a "
             "checkpoint, a run's directory or a safetensors file");
  std::vector<FileOfSet> files;
  for (const std::string& path : paths)
    files.push_back({{.path = path, .bytes = FileReader(path).bytes()}, &model_});
  add_files(std::move(files));
  check_tensors_are_whole(model_, is_folder ? path_ : directory_of(path_));
}

std::optional<std::string> TensorCatalog::model_config() const {
  return read_model_file(path_, manifest_ ? &*manifest_ : nullptr, kModelConfigName);
}

Manifest read_manifest(const std::string& path) {
  return parse_manifest(read_manifest_text(path), path + "/manifest.json");
}

std::string read_manifest_text(const std::string& path) {
  return read_text_file(path + "/manifest.json", kMaxJsonBytes);
}

bool has_damaged_description(const std::string& path) {
  try {
    const std::string text = read_manifest_text(path);
    const bool is_whole = checksum_in(text) == ManifestChecksum::kRight;
    std::optional<Manifest> manifest;
    try {
      manifest = parse_manifest(text, path);
    } catch (const Error&) {
      return !is_whole;
    }
    for (const StoredFile& file : manifest->files)
      if (is_model_file(file.path)) read_model_file(path, &*manifest, file.path);
    return false;
  } catch (const Error&) {
    return true;
  }
}

bool has_damaged_headers(const std::string& path) {
  bool is_readable = false;  // and so not of a later version
  try {
    static_cast<void>(read_manifest(path));
    is_readable = true;
    const TensorCatalog opens(path);
    return false;
  } catch (const Error&) {
    return is_readable || has_damaged_description(path);
  }
}

TensorSet apply(const NameRules& rules, TensorSet set, std::span<const std::string> suffixes) {
  TensorSet renamed;
  for (auto& [name, stored] : set) {
    std::string parameter = name;
    std::string suffix;
    for (const std::string& each : suffixes)
      if (parameter.ends_with(each)) suffix = each;
    parameter.resize(parameter.size() - suffix.size());
    const std::vector<TensorSection> sections =
        rules.sections_of_stored(parameter, stored.tensor.shape);
    for (const TensorSection& section : sections) {
      const auto [found, is_new] = renamed.try_emplace(section.name + suffix);
      FSDP_CHECK(is_new, "two tensors of the checkpoint are called '", shown(section.name + suffix),
                 "' by the name rules; '", shown(name), "' is one of them");
      found->second.tensor = {section.name + suffix, stored.tensor.dtype, section.shape};
    }
    // Boxes are many: where only the name changes they are moved.
    if (sections.size() == 1 && sections[0].shape == stored.tensor.shape) {
      std::erase_if(stored.boxes, [](const StoredBox& box) { return box.place.box.numel() == 0; });
      renamed[sections[0].name + suffix].boxes = std::move(stored.boxes);
      continue;
    }
    for (const StoredBox& box : stored.boxes)
      for (const SectionBox& part : cut_at_sections(sections, box.place.box)) {
        StoredBox cut = box;
        cut.place = part_of(box.place, part.model);
        cut.place.box = part.stored;
        renamed[sections[part.section].name + suffix].boxes.push_back(std::move(cut));
      }
  }
  return renamed;
}

TensorSet moments_of(const TensorCatalog& catalog, const NameRules& rules) {
  TensorSet moments = catalog.moments();
  std::erase_if(moments, [](const auto& each) { return each.first.ends_with(".amax_history"); });
  std::vector<std::string> suffixes;
  if (catalog.manifest())
    for (const std::string& moment : catalog.manifest()->optimizer.moments)
      suffixes.push_back("." + moment);
  return apply(rules, std::move(moments), suffixes);
}

std::map<std::string, std::string> names_of_shared(const TensorCatalog& catalog,
                                                   const NameRules& rules) {
  std::map<std::string, std::string> names;
  if (!catalog.manifest()) return names;
  for (const UnitRecord& unit : catalog.manifest()->units)
    for (const GroupRecord& group : unit.groups)
      for (const GroupRecord::Member& member : group.members)
        for (const std::string& alias : member.aliases) {
          const auto from = rules.sections_of_stored(alias, member.shape);
          const auto to = rules.sections_of_stored(member.name, member.shape);
          for (size_t i = 0; i < from.size() && from.size() == to.size(); ++i)
            names[from[i].name] = to[i].name;
        }
  return names;
}

std::string some_of(std::span<const std::string> names) {
  constexpr size_t kMost = 20;
  std::vector<std::string> quoted;
  for (const std::string& name : names.subspan(0, std::min(names.size(), kMost)))
    quoted.push_back(concat("'", shown(name), "'"));
  return concat(join(quoted, ", "),
                names.size() > kMost ? concat(" and ", names.size() - kMost, " more") : "");
}

}  // namespace fsdp
