// Patches on the disk: patch.json, which says what a patch leads from and to, and one safetensors
// file per rank with the changed elements of each tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

// --- the record ----------------------------------------------------------------------------------

// The file that makes a directory a patch; written last.
inline constexpr std::string_view kPatchRecordName = "patch.json";

struct PatchRecord {
  std::string base;             // of the stream of patches: 16 hexadecimal digits
  int64_t begun = 0;            // when the stream began, in seconds since 1970
  std::optional<int64_t> from;  // nullopt: a full patch, which has every element
  int64_t to = 0;
  std::string names;                  // "hf" or "vllm" (output_tensors.h)
  std::vector<StoredTensor> tensors;  // of the stream, changed or not
  std::vector<StoredFile> files;      // one per rank

  friend bool operator==(const PatchRecord&, const PatchRecord&) = default;
};

std::string to_json(const PatchRecord& record);

// Throws an Error that names `source`, the field and the fault.
PatchRecord parse_patch_record(std::string_view json, const std::string& source);

// The record of the patch in this directory; an Error if there is none.
PatchRecord read_patch_record(const std::string& directory);

// "patch-00000100-00000102", "patch-full-00000100"
std::string patch_name(std::optional<int64_t> from, int64_t to);

// "step 100 to 102 of base 90f0a3c1d2e4b587", for messages.
std::string patch_text(const PatchRecord& record);

// The patches in a directory of patches, in the order in which they are applied: by the step they
// lead to, full ones first. By their names alone, so that a reader finds what is wrong with each;
// without those that are being written.
std::vector<std::string> patches_in(const std::string& directory);

// The step that a patch leads to, by its name.
int64_t last_step_of(const std::string& path);

// Removes what was being written when its writer ended. Nobody may be writing.
void remove_patch_leftovers(const std::string& directory);

// --- positions -----------------------------------------------------------------------------------

// The positions of elements as files have them: ranges, or the numbers of elements between them.
enum class PositionForm : uint8_t {
  kRanges,     // begin and end of each, int64
  kSkips,      // numbers of one byte
  kWideSkips,  // of two
};

// A skip is the number of elements that lie between an element and the one before it; the largest
// number of the width is no element, it skips that many.
template <typename Number>
constexpr int64_t largest_skip() {
  return std::numeric_limits<Number>::max();
}

// The positions that skips of `width` bytes lead to. Error that begins with `source` if a position
// is not below `numel`, or if their number is not `count`.
std::vector<int64_t> decode_skips(std::span<const std::byte> bytes, int64_t width, int64_t count,
                                  int64_t numel, const std::string& source);

// --- files ---------------------------------------------------------------------------------------

// The changed elements of one tensor as a file has them.
struct StoredChange {
  StoredTensor tensor;
  PositionForm form = PositionForm::kRanges;
  std::span<const std::byte> positions;
  std::span<const std::byte> values;  // of these elements, in the tensor's type
};

// A change as it is read: elements of the flattened tensor, ascending.
struct PatchChange {
  StoredTensor tensor;
  std::vector<FlatRange> ranges;       // they do not touch
  std::span<const int64_t> positions;  // if there are no ranges
  std::span<const std::byte> values;   // of these elements, in the tensor's type
};

// Writes `directory`/NNNNN.safetensors for this rank; on the disk when it returns.
StoredFile write_patch_file(const std::string& directory, int64_t rank,
                            std::span<const StoredChange> changes);

// After all ranks have written their files to `temporary`: makes it the patch at `path`, which is
// there as a whole or not at all, whenever the power goes. Takes the place of a patch of that name,
// which a stream before has left: a resumed run comes to the same steps again.
void publish_patch(const std::string& temporary, const std::string& path,
                   const PatchRecord& record);

// Reads every byte of the patch's files. Error that names the first file that is not as written.
void verify_patch_files(const std::string& directory, const PatchRecord& record);

// Calls body(change) for every change, tensor by tensor, of which one is in memory at a time. Does
// not compare checksums; whatever the files hold, changes are elements of the record's tensors, no
// element comes twice, and a full patch has every element. Error otherwise, maybe after some calls.
void for_each_change(const std::string& directory, const PatchRecord& record,
                     const std::function<void(const PatchChange& change)>& body);

}  // namespace fsdp
