// patch.json: what a patch of weights leads from and to, its tensors and its files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/format/manifest.h"

namespace fsdp {

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

// Of the patch in this directory; an Error if there is none.
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

}  // namespace fsdp
