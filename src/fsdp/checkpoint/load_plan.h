// Finds the stored tensors for each tensor of a model, and checks names, shapes and types before
// anything is changed.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/layout/box.h"

namespace fsdp {

// A tensor of the model, with its name and its place in the list.
struct WantedTensor {
  std::string name;
  std::vector<std::string> aliases;  // other names under which it may be stored
  std::vector<int64_t> shape;        // of the whole tensor
  DType dtype = DType::kFloat32;     // in memory; other floating types are converted
  OwnedSlice owned = {};             // what is read of it
  bool keeps_value = false;          // whatever is stored
};

// Where a tensor's elements are stored, section after section.
class TensorSource {
 public:
  bool is_missing() const { return stored_.empty(); }
  DType dtype() const { return stored_.front()->tensor.dtype; }

  // Adds reads of elements [range) of the flattened slice to `into`, packed, in dtype().
  void add_reads(FlatRange range, std::byte* into, std::vector<FileRun>& runs) const;

 private:
  friend class LoadPlan;
  std::vector<int64_t> shape_;  // of the slice
  OwnedSlice owned_;
  std::vector<TensorSection> sections_;  // of the whole tensor
  std::vector<const CatalogTensor*> stored_;
};

// The differences that are allowed between model and checkpoint.
struct LoadTolerance {
  std::vector<std::string> allow_missing = {};  // globs on names in the model or the checkpoint
  std::vector<std::string> ignored = {};        // globs on names in the checkpoint
  bool allows_extra = false;
  bool is_offered = true;  // whether the caller can allow more; then errors say how
};

class LoadPlan {
 public:
  LoadPlan(const std::string& path, NameRules names);

  const TensorCatalog& catalog() const { return catalog_; }

  // Sources in the order of `wanted`. Collects faults until check().
  std::vector<TensorSource> find_model(std::span<const WantedTensor> wanted);
  // Moments are named "<parameter>.<moment>".
  std::vector<TensorSource> find_moments(std::span<const WantedTensor> wanted,
                                         const std::string& moment);

  // Throws one Error about all faults. Otherwise missing() and extra() list the tolerated ones.
  void check(const LoadTolerance& tolerance);
  const std::vector<std::string>& missing() const { return missing_; }
  const std::vector<std::string>& extra() const { return extra_; }

 private:
  std::vector<TensorSource> find(TensorSet& set, std::span<const WantedTensor> wanted,
                                 const std::string& suffix);
  // The first of the names that exists; all names that exist count as used.
  const CatalogTensor* find_stored(TensorSet& set, std::span<const std::string> names,
                                   const std::string& suffix);
  // The names under which each section of the tensor may be stored.
  std::vector<std::vector<std::string>> names_of(const WantedTensor& tensor,
                                                 std::span<const TensorSection> sections) const;
  std::vector<std::string> not_allowed(const LoadTolerance& tolerance) const;

  const TensorCatalog catalog_;
  const NameRules names_;
  std::map<std::string, std::string> stored_under_;  // alias of a shared parameter -> its name
  TensorSet model_;
  TensorSet moments_;
  std::map<std::string, bool> is_used_;  // stored tensors that were asked for
  struct Origin {
    std::string model_name;
    bool is_moment = false;
  };
  std::vector<std::string> missing_;
  std::vector<Origin> missing_from_;  // of each
  std::vector<std::string> extra_;
  std::vector<std::string> wrong_shape_;
  std::vector<std::string> wrong_type_;
};

}  // namespace fsdp
