// Which stored tensors each tensor of a model comes from: names, shapes and types are checked here,
// before anything is changed.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/tensor_catalog.h"
#include "fsdp/checkpoint/verified_reads.h"

namespace fsdp {

// A tensor of the model, in the order and by the names it has there.
struct WantedTensor {
  std::string name;
  std::vector<std::string> aliases;  // stored under one of these, it is found as well
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;  // in memory; another floating type is converted
};

// Where its elements are; sections one after the other.
class TensorSource {
 public:
  bool is_missing() const { return stored_.empty(); }
  DType dtype() const { return stored_.front()->tensor.dtype; }

  // Elements [range) of the flattened tensor go to `into`, packed, in dtype().
  void add_reads(FlatRange range, std::byte* into, std::vector<FileRun>& runs) const;

 private:
  friend class LoadPlan;
  std::vector<int64_t> shape_;
  std::vector<TensorSection> sections_;
  std::vector<const CatalogTensor*> stored_;
};

// What may differ between model and checkpoint.
struct LoadTolerance {
  std::vector<std::string> allow_missing = {};  // globs on names in the model or the checkpoint
  bool allows_extra = false;
  bool is_offered = true;  // whether who called can allow more; errors say how
};

class LoadPlan {
 public:
  LoadPlan(const std::string& path, NameRules names);

  const TensorCatalog& catalog() const { return catalog_; }

  // Sources in the order of what is wanted. Faults are collected until check().
  std::vector<TensorSource> find_model(std::span<const WantedTensor> wanted);
  // Moments are called "<parameter>.<moment>".
  std::vector<TensorSource> find_moments(std::span<const WantedTensor> wanted,
                                         const std::string& moment);

  // One Error about all that does not fit. Otherwise missing() and extra() are what is tolerated.
  void check(const LoadTolerance& tolerance);
  const std::vector<std::string>& missing() const { return missing_; }
  const std::vector<std::string>& extra() const { return extra_; }

 private:
  std::vector<TensorSource> find(TensorSet& set, std::span<const WantedTensor> wanted,
                                 const std::string& suffix);
  // The first of the names that is there; all that are count as used.
  const CatalogTensor* find_stored(TensorSet& set, std::span<const std::string> names,
                                   const std::string& suffix);
  // Under which each of its sections may be found.
  std::vector<std::vector<std::string>> names_of(const WantedTensor& tensor,
                                                 std::span<const TensorSection> sections) const;
  std::vector<std::string> not_allowed(const LoadTolerance& tolerance) const;

  const TensorCatalog catalog_;
  const NameRules names_;
  std::map<std::string, std::string> stored_under_;  // alias of a shared parameter -> its name
  TensorSet model_;
  TensorSet moments_;
  std::map<std::string, bool> is_used_;  // tensors of the sets that were asked for
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
