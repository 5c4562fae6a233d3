#include "fsdp/checkpoint/tools/converted_files.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/tools/tensor_numbers.h"

namespace fsdp {

namespace {

std::vector<StoredTensor> stored_as(std::span<const CatalogTensor> tensors,
                                    const ConvertedReads& reads) {
  std::vector<StoredTensor> list;
  for (const CatalogTensor& tensor : tensors) {
    list.push_back(tensor.tensor);
    list.back().dtype = reads.dtype_of(tensor.tensor);
  }
  return list;
}

// The part that a rank writes of tensor `index` of its list: a flat range that is one box; it may
// be empty.
FlatRange share_of_rows(const StoredTensor& tensor, int64_t index, int64_t rank, int64_t ranks) {
  const int64_t numel = numel_of(tensor);
  if (numel == 0) return {};
  // Deals small tensors to the ranks in turn.
  if (tensor.shape.size() < 2) return index % ranks == rank ? FlatRange{0, numel} : FlatRange{};
  const int64_t num_rows = tensor.shape.front();
  const int64_t row_numel = numel / num_rows;
  const int64_t share = ceil_div(num_rows, ranks);
  const auto cut = [&](int64_t i) {
    return std::min(i < num_rows ? i * share : num_rows, num_rows) * row_numel;
  };
  const FlatRange range{cut(rank), cut(rank + 1)};
  return range.empty() ? FlatRange{} : range;
}

std::vector<Piece> pieces_of(std::span<const CatalogTensor> tensors, ConvertedReads& reads,
                             int64_t rank, int64_t ranks) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const CatalogTensor& tensor = tensors[i];
    const std::vector<int64_t>& shape = tensor.tensor.shape;
    const FlatRange share = share_of_rows(tensor.tensor, static_cast<int64_t>(i), rank, ranks);
    std::vector<Box> parts = boxes(shape, share);
    // Gives a tensor without elements an empty box, or no file would mention it.
    if (numel_of(tensor.tensor) == 0 && rank == 0)
      parts.push_back({std::vector<int64_t>(shape.size(), 0), shape});
    if (parts.empty()) continue;
    FSDP_ASSERT(parts.size() == 1, tensor.tensor.name, " has ", parts.size(), " boxes");
    pieces.push_back(
        {.name = tensor.tensor.name,
         .dtype = reads.dtype_of(tensor.tensor),
         .box = std::move(parts.front()),
         .read = [&tensor, &reads, share](FlatRange range, std::byte* into) {
           reads.read(tensor, {share.begin + range.begin, share.begin + range.end}, into);
         }});
  }
  return pieces;
}

}  // namespace

void write_sharded_files(const std::string& directory, const ShardedContent& content,
                         ConvertedReads& model, ConvertedReads& moments,
                         const ShardedOptions& options) {
  Manifest manifest = content.manifest;
  manifest.files.clear();
  const bool has_same_ranks = static_cast<int64_t>(content.ranks.size()) == options.ranks;
  if (!has_same_ranks) {
    manifest.mesh = {.outer = 1, .inner = options.ranks};
    manifest.sum_group = 0;
  }
  manifest.model = stored_as(content.model, model);
  manifest.moments = stored_as(content.moments, moments);
  make_directories(directory + "/ranks");
  for (int64_t rank = 0; rank < options.ranks; ++rank) {
    RankRecord record;
    if (has_same_ranks) record = content.ranks[static_cast<size_t>(rank)];
    record.rank = rank;
    record.block_bytes = options.write.block_bytes;
    const std::vector<Piece> model_pieces = pieces_of(content.model, model, rank, options.ranks);
    const std::vector<Piece> moment_pieces =
        pieces_of(content.moments, moments, rank, options.ranks);
    std::vector<FolderPieces> folders = {{"model", model_pieces}};
    if (!moment_pieces.empty()) folders.push_back({"optimizer", moment_pieces});
    record.files = write_pieces(directory, rank, folders, options.write);
    const std::string text = to_json(record);
    write_file_durably(concat(directory, "/", rank_record_path(rank)), text);
    list_files(record, text, manifest.files);
  }
  for (StoredFile& file : write_model_files(directory, content.model_files))
    manifest.files.push_back(std::move(file));
  write_file_durably(concat(directory, "/", kManifestName), to_json(manifest));
}

DType main_dtype(std::span<const CatalogTensor> tensors, const ConvertedReads& reads) {
  return main_dtype(stored_as(tensors, reads));
}

std::vector<std::string> write_huggingface_files(const std::string& directory,
                                                 std::span<const CatalogTensor> tensors,
                                                 ConvertedReads& reads,
                                                 const HuggingFaceOptions& options) {
  HuggingFaceFiles files(directory, stored_as(tensors, reads), options);
  std::vector<std::byte> chunk;
  for (const CatalogTensor& tensor : tensors) {
    const int64_t width = element_bytes(reads.dtype_of(tensor.tensor));
    for_each_chunk(numel_of(tensor.tensor), width, [&](FlatRange range) {
      chunk.resize(static_cast<size_t>(range.numel() * width));
      reads.read(tensor, range, chunk.data());
      files.write(chunk);
    });
  }
  return files.finish();
}

// --- HuggingFace's files -------------------------------------------------------------------------

namespace {

std::string file_name(const std::string& name, size_t index, size_t count) {
  if (count == 1) return concat(name, ".safetensors");
  char place[64];
  std::snprintf(place, sizeof place, "-%05zu-of-%05zu.safetensors", index + 1, count);
  return name + place;
}

std::string index_text(std::span<const StoredTensor> tensors, std::span<const FlatRange> files,
                       std::span<const std::string> names) {
  int64_t numel = 0;
  int64_t bytes = 0;
  std::map<std::string, std::string> places;
  for (size_t i = 0; i < files.size(); ++i)
    for (int64_t k = files[i].begin; k < files[i].end; ++k) {
      const StoredTensor& tensor = tensors[static_cast<size_t>(k)];
      numel += numel_of(tensor);
      bytes += bytes_of(tensor);
      places[tensor.name] = names[i];
    }
  const nlohmann::ordered_json index = {
      {"metadata", {{"total_parameters", numel}, {"total_size", bytes}}}, {"weight_map", places}};
  return index.dump(2) + "\n";
}

}  // namespace

DType main_dtype(std::span<const StoredTensor> tensors) {
  std::map<DType, int64_t> bytes;
  for (const StoredTensor& tensor : tensors)
    if (is_floating(tensor.dtype)) bytes[tensor.dtype] += bytes_of(tensor);
  const auto most = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? DType::kFloat32 : most->first;
}

HuggingFaceFiles::HuggingFaceFiles(std::string directory, std::vector<StoredTensor> tensors,
                                   HuggingFaceOptions options)
    : directory_(std::move(directory)), tensors_(std::move(tensors)), options_(std::move(options)) {
  // Each file has as many consecutive tensors as fit, at least one.
  files_ = {{0, 0}};
  int64_t used = 0;
  for (const StoredTensor& tensor : tensors_) {
    const int64_t bytes = bytes_of(tensor);
    if (!files_.back().empty() && used + bytes > options_.max_file_bytes) {
      files_.push_back({files_.back().end, files_.back().end});
      used = 0;
    }
    ++files_.back().end;
    used += bytes;
  }
  for (size_t i = 0; i < files_.size(); ++i)
    names_.push_back(file_name(options_.name, i, files_.size()));
}

void HuggingFaceFiles::open_next() {
  if (writer_) writer_->commit(names_[num_opened_ - 1]);
  SafetensorsHeader header;
  header.metadata["format"] = "pt";  // loaders ask for it
  for (int64_t k = files_[num_opened_].begin; k < files_[num_opened_].end; ++k) {
    const StoredTensor& tensor = tensors_[static_cast<size_t>(k)];
    header.tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  writer_.emplace(concat(directory_, "/", names_[num_opened_++]), std::move(header));
}

void HuggingFaceFiles::write(std::span<const std::byte> bytes) {
  while (!writer_ || writer_->is_full()) open_next();  // some have no elements
  writer_->write(bytes);
}

std::vector<std::string> HuggingFaceFiles::finish() {
  while (num_opened_ < files_.size()) open_next();
  writer_->commit(names_.back());
  if (files_.size() > 1)
    write_file_durably(concat(directory_, "/", options_.name, ".safetensors.index.json"),
                       index_text(tensors_, files_, names_));
  if (options_.config)
    write_file_durably(
        concat(directory_, "/", kModelConfigName),
        with_stored_dtype(*options_.config, std::string(kModelConfigName), main_dtype(tensors_)));
  write_model_files(directory_, options_.model_files);
  return names_;
}

// --- weights of a model --------------------------------------------------------------------------

namespace {

// Files of early Llamas hold the frequencies of rotary embeddings, which are computed today.
constexpr std::string_view kRotaryTable = ".rotary_emb.inv_freq";

constexpr const char* kEmbeddingName = "model.embed_tokens.weight";
constexpr const char* kHeadName = "lm_head.weight";

// Collects faults of names and shapes, to report them together.
class Fit {
 public:
  Fit(const TensorCatalog& catalog, const TensorSet& model, const ExpectedWeights& expected)
      : catalog_(catalog), model_(model), expected_(expected) {}

  WeightSelection select(const std::map<std::string, std::string>& aliases) {
    for (const NamedShape& wanted : expected_.tensors) {
      auto found = model_.find(wanted.name);
      if (const auto alias = aliases.find(wanted.name);
          found == model_.end() && alias != aliases.end())
        found = model_.find(alias->second);
      if (found == model_.end()) {
        missing_.push_back(wanted.name);
      } else {
        take(wanted, found->second);
      }
    }
    for (const auto& [name, tensor] : model_)
      if (used_.count(name) == 0) leave_out(tensor);
    refuse_faults();
    return std::move(selection_);
  }

 private:
  void take(const NamedShape& wanted, const CatalogTensor& stored) {
    used_.insert(stored.tensor.name);
    if (stored.tensor.shape != wanted.shape)
      wrong_.push_back(concat(wanted.name, " ", list_text(stored.tensor.shape), " instead of ",
                              list_text(wanted.shape)));
    selection_.tensors.push_back(stored);
    selection_.tensors.back().tensor.name = wanted.name;
  }

  void leave_out(const CatalogTensor& tensor) {
    const std::string& name = tensor.tensor.name;
    const bool is_tied_head = expected_.ties_head && name == kHeadName;
    if (!is_tied_head && !name.ends_with(kRotaryTable)) {
      extra_.push_back(name);
      return;
    }
    if (is_tied_head) check_tied(tensor);
    selection_.left_out.push_back(name);
  }

  void check_tied(const CatalogTensor& head) const {
    const auto embedding = model_.find(kEmbeddingName);
    if (embedding == model_.end()) return;  // reported as missing
    const TensorSet first{{kHeadName, head}};
    const TensorSet second{{kHeadName, embedding->second}};
    FSDP_CHECK(differences_of({first, catalog_.files()}, {second, catalog_.files()}).empty(),
               catalog_.path(), ": ", kHeadName, " and ", kEmbeddingName,
               " have different values, but tie_word_embeddings in ", expected_.source,
               " is true; set it to false there, or give a file that says so with --config");
  }

  void refuse_faults() const {
    std::vector<std::string> faults;
    if (!missing_.empty()) faults.push_back(concat("it lacks ", some_of(missing_)));
    if (!extra_.empty()) faults.push_back(concat("it also has ", some_of(extra_)));
    if (!wrong_.empty()) faults.push_back(concat("other shapes have ", some_of(wrong_)));
    FSDP_CHECK(faults.empty(), catalog_.path(), " does not fit ", expected_.source, ": ",
               join(faults, "; "),
               "; give the model's own config.json with --config, or rules for its names with "
               "--names");
  }

  const TensorCatalog& catalog_;
  const TensorSet& model_;
  const ExpectedWeights& expected_;
  std::set<std::string> used_;  // stored names
  std::vector<std::string> missing_;
  std::vector<std::string> extra_;
  std::vector<std::string> wrong_;
  WeightSelection selection_;
};

}  // namespace

WeightSelection select_all(const TensorCatalog& catalog, const TensorSet& model) {
  WeightSelection selection;
  std::set<std::string> taken;
  if (catalog.manifest())
    for (const StoredTensor& tensor : catalog.manifest()->model)
      if (const auto found = model.find(tensor.name); found != model.end()) {
        selection.tensors.push_back(found->second);
        taken.insert(tensor.name);
      }
  const size_t num_known = selection.tensors.size();
  for (const auto& [name, tensor] : model)
    if (taken.count(name) == 0) selection.tensors.push_back(tensor);
  const auto place_of = [](const CatalogTensor& tensor) {
    return tensor.boxes.empty()
               ? std::tuple(size_t{0}, int64_t{0})
               : std::tuple(tensor.boxes.front().file, tensor.boxes.front().data_begin);
  };
  std::stable_sort(
      selection.tensors.begin() + static_cast<std::ptrdiff_t>(num_known), selection.tensors.end(),
      [&](const CatalogTensor& a, const CatalogTensor& b) { return place_of(a) < place_of(b); });
  return selection;
}

WeightSelection select_weights(const TensorCatalog& catalog, const TensorSet& model,
                               const ExpectedWeights& expected, const NameRules& rules) {
  return Fit(catalog, model, expected).select(names_of_shared(catalog, rules));
}

std::vector<CatalogTensor> apply_in_order(const NameRules& rules,
                                          std::span<const CatalogTensor> tensors) {
  std::vector<CatalogTensor> renamed;
  std::set<std::string> names;
  for (const CatalogTensor& tensor : tensors)
    for (const auto& [name, section] :
         fsdp::apply(rules, TensorSet{{tensor.tensor.name, tensor}})) {
      FSDP_CHECK(names.insert(name).second, "two tensors of the checkpoint are called '",
                 shown(name), "' by the name rules; '", shown(tensor.tensor.name),
                 "' is one of them");
      renamed.push_back(section);
    }
  return renamed;
}

}  // namespace fsdp
