#include "fsdp/checkpoint/patches/applied_patches.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/patches/patch_files.h"

namespace fsdp {

namespace {

constexpr int64_t kMaxAppliedBytes = 4096;
constexpr int64_t kUnfinished = -1;  // a step: a full patch is being applied

// A file whose bytes are changed in memory, and on the disk after sync().
class MappedFile {
 public:
  explicit MappedFile(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {
    FSDP_CHECK(file_.is_open(), path,
               ": cannot open the file to change it: ", std::generic_category().message(errno));
    bytes_ = static_cast<size_t>(::lseek(file_.descriptor(), 0, SEEK_END));
    address_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.descriptor(), 0);
    FSDP_CHECK(address_ != MAP_FAILED, path,
               ": cannot map the file: ", std::generic_category().message(errno));
  }
  ~MappedFile() { ::munmap(address_, bytes_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::byte* at(int64_t offset) const { return static_cast<std::byte*>(address_) + offset; }
  void sync() const {
    FSDP_CHECK(::msync(address_, bytes_, MS_SYNC) == 0, path_,
               ": cannot write the file: ", std::generic_category().message(errno));
  }

 private:
  const std::string path_;
  FileHandle file_;
  size_t bytes_ = 0;
  void* address_ = nullptr;
};

void write_applied(const std::string& directory, const nlohmann::ordered_json& state) {
  write_file_durably(concat(directory, "/", kAppliedName), state.dump(1) + "\n");
}

// The patch's tensors must be there, of the same type and shape.
void check_tensors(const TensorCatalog& weights, const PatchRecord& record) {
  for (const StoredTensor& tensor : record.tensors) {
    const auto it = weights.model().find(tensor.name);
    FSDP_CHECK(it != weights.model().end(), weights.path(), ": has no tensor '", tensor.name,
               "', which the patch has under names of kind '", record.names,
               "'; give weights of the same model under those names");
    const StoredTensor& there = it->second.tensor;
    FSDP_CHECK(there.dtype == tensor.dtype && there.shape == tensor.shape, weights.path(), ": '",
               tensor.name, "' is ", name_of(there.dtype), " ", list_text(there.shape),
               " and in the patch ", name_of(tensor.dtype), " ", list_text(tensor.shape),
               "; export the weights in the type that the trainer computes in (--dtype)");
  }
}

void copy_elements(const PatchChange& change, std::byte* into) {
  const auto width = static_cast<size_t>(element_bytes(change.tensor.dtype));
  const std::byte* from = change.values.data();
  for (const FlatRange& range : change.ranges) {
    const size_t bytes = static_cast<size_t>(range.numel()) * width;
    std::memcpy(into + static_cast<size_t>(range.begin) * width, from, bytes);
    from += bytes;
  }
  for (const int64_t position : change.positions) {
    std::memcpy(into + static_cast<size_t>(position) * width, from, width);
    from += width;
  }
}

}  // namespace

std::optional<AppliedPatch> read_applied(const std::string& directory) {
  const std::string path = concat(directory, "/", kAppliedName);
  if (!path_exists(path)) return std::nullopt;
  const nlohmann::json document = parse_json(read_text_file(path, kMaxAppliedBytes), path);
  const JsonFields fields(document, path, "");
  return AppliedPatch{fields.text("base"), fields.integer("step")};
}

void check_follows(const std::optional<AppliedPatch>& applied, const PatchRecord& record,
                   const std::string& patch) {
  if (!record.from) return;
  FSDP_CHECK(applied.has_value(), patch, ": leads from step ", *record.from, " of base ",
             record.base, ", but no patch was applied yet; begin with a full one");
  FSDP_CHECK(applied->base == record.base, patch, ": is of base ", record.base,
             ", but the weights are of base ", applied->base,
             "; apply the full patch that its base began with");
  FSDP_CHECK(applied->step != kUnfinished, patch, ": leads from step ", *record.from,
             ", but applying a full patch was interrupted; apply that one again first");
  FSDP_CHECK(applied->step == *record.from, patch, ": leads from step ", *record.from,
             ", but the weights are of step ", applied->step,
             applied->step < *record.from ? "; apply the patches between them first"
                                          : "; it was applied already");
}

AppliedChanges apply_patch(const std::string& patch, const std::string& directory) {
  const PatchRecord record = read_patch_record(patch);
  check_follows(read_applied(directory), record, patch);
  const TensorCatalog weights(directory);
  FSDP_CHECK(!weights.manifest(), directory,
             ": is a checkpoint, whose checksums would no longer hold; convert it first (fsdp "
             "convert --to hf)");
  check_tensors(weights, record);
  verify_patch_files(patch, record);
  for_each_change(patch, record, [](const PatchChange&) {});  // everything can be read

  // Until the end the weights are neither of the old step nor of the new one, but applying the
  // patch again leads to the new one whatever was written.
  if (!record.from) write_applied(directory, {{"base", record.base}, {"step", kUnfinished}});
  std::map<size_t, MappedFile> files;
  std::set<std::string> tensors;
  AppliedChanges changes;
  for_each_change(patch, record, [&](const PatchChange& change) {
    const CatalogTensor& tensor = weights.model().at(change.tensor.name);
    const StoredBox& box = tensor.boxes.front();  // whole tensors
    const MappedFile& file =
        files.try_emplace(box.file, weights.files()[box.file].path).first->second;
    copy_elements(change, file.at(box.data_begin));
    tensors.insert(change.tensor.name);
    changes.num_elements +=
        static_cast<int64_t>(change.values.size()) / element_bytes(change.tensor.dtype);
  });
  for (const auto& [index, file] : files) file.sync();
  write_applied(directory, {{"base", record.base}, {"step", record.to}});
  changes.num_tensors = static_cast<int64_t>(tensors.size());
  return changes;
}

}  // namespace fsdp
