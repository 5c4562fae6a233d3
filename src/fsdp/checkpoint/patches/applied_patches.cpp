#include "fsdp/checkpoint/patches/applied_patches.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp {

namespace {

constexpr int64_t kMaxAppliedBytes = 4096;
constexpr int64_t kWindowBytes = int64_t{64} << 10;
constexpr std::string_view kTemporaryPrefix = ".patches-applied.";

// Elements of a file that are changed in ascending order, a window of bytes at a time. Not mapped:
// a disk that is full would end the process, where write() gives an error.
class ChangedFile {
 public:
  explicit ChangedFile(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {
    FSDP_CHECK(file_.is_open(), path,
               ": cannot open the file to change it: ", std::generic_category().message(errno));
  }

  // So that a sparse file fails before anything is changed.
  void allocate(int64_t bytes) const {
    if (const int error = ::posix_fallocate(file_.descriptor(), 0, bytes); error != 0)
      fail("give the file its space on the disk", error);
  }

  void put(int64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const int64_t begin = offset / kWindowBytes * kWindowBytes;
      if (begin != begin_) open_window(begin);
      const int64_t place = offset - begin_;
      const size_t count = std::min(bytes.size(), window_.size() - static_cast<size_t>(place));
      FSDP_CHECK(count > 0, path_, ": has become shorter while it was changed");
      std::memcpy(window_.data() + place, bytes.data(), count);
      offset += static_cast<int64_t>(count);
      bytes = bytes.subspan(count);
    }
  }

  // On the disk when it returns.
  void sync() {
    open_window(-1);
    if (::fsync(file_.descriptor()) != 0) fail("write the file", errno);
  }

 private:
  [[noreturn]] void fail(const char* tried, int error) const {
    throw Error(concat(path_, ": cannot ", tried, ": ", std::generic_category().message(error),
                       error == ENOSPC ? "; make space, and apply the patch again" : ""));
  }

  // Writes the window before; -1: opens none.
  void open_window(int64_t begin) {
    for (size_t done = 0; begin_ >= 0 && done < window_.size();) {
      const ssize_t count = ::pwrite(file_.descriptor(), window_.data() + done,
                                     window_.size() - done, begin_ + static_cast<int64_t>(done));
      if (count < 0 && errno != EINTR) fail("write the file", errno);
      done += static_cast<size_t>(std::max<ssize_t>(count, 0));
    }
    begin_ = begin;
    if (begin < 0) return;
    window_.resize(kWindowBytes);
    ssize_t count = -1;
    while ((count = ::pread(file_.descriptor(), window_.data(), window_.size(), begin)) < 0)
      if (errno != EINTR) fail("read the file", errno);
    window_.resize(static_cast<size_t>(count));  // a regular file gives less at its end alone
  }

  const std::string path_;
  FileHandle file_;
  std::vector<std::byte> window_;
  int64_t begin_ = -1;  // of the window in the file; -1: there is none
};

// While it lives, nobody else applies patches to the weights in the directory.
FileHandle lock_weights(const std::string& directory) {
  FileHandle handle = lock_directory(directory);
  FSDP_CHECK(handle.is_open(), directory,
             ": another process is applying patches to these weights; wait for it");
  return handle;
}

void remove_leftovers(const std::string& directory) {
  for (const std::string& name : names_in(directory))
    if ((name.starts_with(kTemporaryPrefix) || name.starts_with(concat(".", kAppliedName))) &&
        name.ends_with(".tmp"))
      remove_tree(concat(directory, "/", name));
}

// Gives the directory a copy of its own of a file that lies in a cache, say, which others read.
void own_file(const std::string& path, int64_t bytes) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || (S_ISREG(status.st_mode) && status.st_nlink == 1))
    return;
  const std::string copy =
      concat(directory_of(path), "/", kTemporaryPrefix, file_name_of(path), ".tmp");
  const FileReader from(path);
  FileWriter to(copy);
  std::vector<std::byte> chunk;
  for_each_chunk(bytes, 1, [&](FlatRange range) {
    chunk.resize(static_cast<size_t>(range.numel()));
    from.read(range.begin, chunk);
    to.write(chunk);
  });
  to.commit();
  rename_durably(copy, path);
}

void write_applied(const std::string& directory, const AppliedPatch& applied) {
  nlohmann::ordered_json state = {{"base", applied.base}, {"step", applied.step}};
  if (applied.applying) state["applying"] = *applied.applying;
  write_file_durably(concat(directory, "/", kAppliedName), with_checksum(state.dump(1) + "\n"));
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

// `begin`: of the tensor in the file.
void put_elements(const PatchChange& change, int64_t begin, ChangedFile& file) {
  const int64_t width = element_bytes(change.tensor.dtype);
  std::span<const std::byte> from = change.values;
  const auto put = [&](int64_t position, int64_t count) {
    const auto bytes = static_cast<size_t>(count * width);
    file.put(begin + position * width, from.first(bytes));
    from = from.subspan(bytes);
  };
  for (const FlatRange& range : change.ranges) put(range.begin, range.numel());
  for (const int64_t position : change.positions) put(position, 1);
}

// A patch that can be read as a whole, for these weights.
PatchRecord checked_patch(const std::string& patch, const TensorCatalog& weights) {
  const PatchRecord record = read_patch_record(patch);
  check_tensors(weights, record);
  verify_patch_files(patch, record);
  for_each_change(patch, record, [](const PatchChange&) {});
  return record;
}

AppliedChanges put_patch(const std::string& patch, const PatchRecord& record,
                         const TensorCatalog& weights) {
  const auto box_of = [&](const std::string& tensor) -> const StoredBox& {
    return weights.model().at(tensor).boxes.front();  // whole tensors
  };
  std::map<size_t, ChangedFile> files;
  for (const StoredTensor& tensor : record.tensors) {
    const size_t index = box_of(tensor.name).file;
    if (files.count(index) > 0) continue;
    const CheckedFile& file = weights.files()[index];
    own_file(file.path, file.bytes);
    files.try_emplace(index, file.path).first->second.allocate(file.bytes);
  }
  // Until the end the weights are neither of the old step nor of the new one, but applying the
  // patch again leads to the new one whatever was written.
  write_applied(weights.path(),
                {record.base, record.from.value_or(AppliedPatch::kNoStep), record.to});
  std::set<std::string> tensors;
  AppliedChanges changes;
  for_each_change(patch, record, [&](const PatchChange& change) {
    const StoredBox& box = box_of(change.tensor.name);
    put_elements(change, box.data_begin, files.at(box.file));
    tensors.insert(change.tensor.name);
    changes.num_elements +=
        static_cast<int64_t>(change.values.size()) / element_bytes(change.tensor.dtype);
  });
  for (auto& [index, file] : files) file.sync();
  write_applied(weights.path(), {record.base, record.to});
  changes.num_tensors = static_cast<int64_t>(tensors.size());
  return changes;
}

TensorCatalog open_weights(const std::string& directory) {
  TensorCatalog weights(directory);
  FSDP_CHECK(!weights.manifest(), directory,
             ": is a checkpoint, whose checksums would no longer hold; convert it first (fsdp "
             "convert --to hf)");
  return weights;
}

}  // namespace

std::optional<AppliedPatch> read_applied(const std::string& directory) {
  const std::string path = concat(directory, "/", kAppliedName);
  if (!path_exists(path)) return std::nullopt;
  const std::string text = read_text_file(path, kMaxAppliedBytes);
  FSDP_CHECK(checksum_in(text) == ManifestChecksum::kRight, path,
             " is not what was written, so nobody knows of which step the weights are; remove it "
             "and apply a full patch");
  const nlohmann::json document = parse_json(text, path);
  const JsonFields fields(document, path, "");
  AppliedPatch applied{fields.text("base"), fields.integer("step")};
  if (fields.has("applying")) applied.applying = fields.integer("applying");
  return applied;
}

void check_follows(const std::optional<AppliedPatch>& applied, const PatchRecord& record,
                   const std::string& patch) {
  if (!record.from) return;
  FSDP_CHECK(applied.has_value(), patch, ": leads from step ", *record.from, " of base ",
             record.base, ", but no patch was applied yet; begin with a full one");
  FSDP_CHECK(applied->base == record.base, patch, ": is of base ", record.base,
             ", but the weights are of base ", applied->base,
             "; apply the full patch that its base began with");
  FSDP_CHECK(applied->step != AppliedPatch::kNoStep, patch, ": leads from step ", *record.from,
             ", but applying a full patch was interrupted; apply that one again first");
  FSDP_CHECK(applied->step == *record.from, patch, ": leads from step ", *record.from,
             ", but the weights are of step ", applied->step,
             applied->step < *record.from ? "; apply the patches between them first"
                                          : "; it was applied already");
  FSDP_CHECK(!applied->applying || applied->applying == record.to, patch, ": leads to step ",
             record.to, ", but applying the one to step ", applied->applying.value_or(0),
             " was interrupted; apply that one again first");
}

AppliedChanges apply_patch(const std::string& patch, const std::string& directory) {
  const FileHandle lock = lock_weights(directory);
  check_follows(read_applied(directory), read_patch_record(patch), patch);
  const TensorCatalog weights = open_weights(directory);
  const PatchRecord record = checked_patch(patch, weights);
  remove_leftovers(directory);
  return put_patch(patch, record, weights);
}

// --- a directory of patches ----------------------------------------------------------------------

namespace {

struct FoundPatch {
  std::string path;
  std::optional<PatchRecord> record;
  std::string fault;  // why it cannot be applied
};

std::vector<FoundPatch> found_patches(const std::string& directory) {
  std::vector<FoundPatch> found;
  for (const std::string& path : patches_in(directory)) {
    FoundPatch& patch = found.emplace_back(FoundPatch{path, std::nullopt, ""});
    try {
      patch.record = read_patch_record(path);
    } catch (const Error& error) {
      patch.fault = error.what();
    }
  }
  return found;
}

// When the stream of these weights began, as its patches say; -1: it has left none.
int64_t begun_of(const std::vector<FoundPatch>& found, const std::optional<AppliedPatch>& applied) {
  int64_t begun = -1;
  for (const FoundPatch& each : found)
    if (applied && each.record && each.record->base == applied->base)
      begun = std::max(begun, each.record->begun);
  return begun;
}

// Whether it has newer weights: of a later step, or of a stream that began later.
bool is_ahead(const FoundPatch& patch, const std::optional<AppliedPatch>& applied, int64_t begun) {
  const PatchRecord& record = *patch.record;
  if (!applied) return true;
  return record.base == applied->base ? record.to > applied->step : record.begun > begun;
}

// The one that leads on from these weights, or else the newest full one that is ahead of them.
FoundPatch* next_patch(std::vector<FoundPatch>& found, const std::optional<AppliedPatch>& applied) {
  const int64_t begun = begun_of(found, applied);
  FoundPatch* full = nullptr;
  for (FoundPatch& each : found) {
    if (!each.record || !each.fault.empty()) continue;
    const PatchRecord& record = *each.record;
    if (applied && record.base == applied->base && record.from == applied->step &&
        applied->applying.value_or(record.to) == record.to)
      return &each;
    const auto age = [](const FoundPatch& patch) {
      return std::pair(patch.record->begun, patch.record->to);
    };
    if (!record.from && is_ahead(each, applied, begun) && (!full || age(each) > age(*full)))
      full = &each;
  }
  return full;
}

// Nothing that is left may lead beyond what was applied.
void check_nothing_is_missing(const std::vector<FoundPatch>& found,
                              const std::optional<AppliedPatch>& applied,
                              const std::string& patches, const std::string& directory) {
  const int64_t begun = begun_of(found, applied);
  const std::string state = !applied ? concat(directory, ": has the weights of no known step")
                            : applied->step == AppliedPatch::kNoStep || applied->applying
                                ? concat(directory, ": has weights between two steps")
                                : concat(directory, ": has the weights of step ", applied->step);
  for (const FoundPatch& each : found) {
    const bool is_missed = each.record ? is_ahead(each, applied, begun)
                                       : !applied || last_step_of(each.path) > applied->step;
    if (!is_missed) continue;
    FSDP_CHECK(each.fault.empty(), state, " and goes no further, because ", each.fault);
    FSDP_CHECK(false, state, ", and no patch in ", patches, " leads from there to ", each.path,
               " (", patch_text(*each.record), "): one was lost; let the trainer write a full one");
  }
  FSDP_CHECK(applied && applied->step != AppliedPatch::kNoStep && !applied->applying, state,
             ", and ", patches, " has no patch that leads on; let the trainer write a full one");
}

}  // namespace

void apply_new_patches(const std::string& patches, const std::string& directory,
                       const OnApplied& on_applied) {
  const FileHandle lock = lock_weights(directory);
  const TensorCatalog weights = open_weights(directory);
  remove_leftovers(directory);
  std::vector<FoundPatch> found = found_patches(patches);
  while (FoundPatch* next = next_patch(found, read_applied(directory))) {
    PatchRecord record;
    try {
      record = checked_patch(next->path, weights);
    } catch (const Error& error) {  // another one may do
      next->fault = error.what();
      continue;
    }
    on_applied(next->path, put_patch(next->path, record, weights));
  }
  check_nothing_is_missing(found, read_applied(directory), patches, directory);
}

}  // namespace fsdp
