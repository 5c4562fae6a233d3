// The safetensors files of a patch: one per rank, with the changed elements of each tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/patches/patch_positions.h"
#include "fsdp/checkpoint/patches/patch_record.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

// The changed elements of one tensor as a file has them.
struct StoredChange {
  StoredTensor tensor;
  PositionForm form = PositionForm::kRanges;
  std::span<const std::byte> positions;
  std::span<const std::byte> values;  // of these elements, in the tensor's type
};

// The same as it is read: elements of the flattened tensor, ascending.
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
