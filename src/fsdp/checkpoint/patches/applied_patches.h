// Weights in safetensors files as a receiver of patches: what was applied, and what may come next.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "fsdp/checkpoint/patches/patch_files.h"

namespace fsdp {

// The file in the directory of the weights that says which patch was applied last.
inline constexpr std::string_view kAppliedName = "patches-applied.json";

struct AppliedPatch {
  std::string base;
  int64_t step = 0;  // kNoStep: unknown, because applying a full patch was interrupted
  // The step to which a patch leads that is being applied, or whose application was interrupted.
  std::optional<int64_t> applying = std::nullopt;

  static constexpr int64_t kNoStep = -1;
  friend bool operator==(const AppliedPatch&, const AppliedPatch&) = default;
};

// nullopt: none was applied yet. Error if the file is not as it was written.
std::optional<AppliedPatch> read_applied(const std::string& directory);

// Throws an Error of one sentence if the patch does not follow `applied`: a gap, another base, or a
// patch that is not full where nothing was applied.
void check_follows(const std::optional<AppliedPatch>& applied, const PatchRecord& record,
                   const std::string& patch);

struct AppliedChanges {
  int64_t num_elements = 0;
  int64_t num_tensors = 0;
};

// Changes the weights in `directory` (whole tensors in safetensors files, as convert --to hf writes
// them) in place; files that others share by a link are copied first. Everything is checked before
// anything changes. If it is interrupted, the same patch can be applied again, and no other one
// except a full one.
AppliedChanges apply_patch(const std::string& patch, const std::string& directory);

// Applies those of a directory of patches that lead on from what was applied, and full ones where a
// newer stream has begun or where a patch is lost or damaged. Calls on_applied(patch, changes)
// after each. Error that says what is missing if the weights are not those of the newest patch
// then.
using OnApplied = std::function<void(const std::string& patch, const AppliedChanges& changes)>;
void apply_new_patches(const std::string& patches, const std::string& directory,
                       const OnApplied& on_applied);

}  // namespace fsdp
