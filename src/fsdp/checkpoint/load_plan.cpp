#include "fsdp/checkpoint/load_plan.h"

#include <algorithm>

#include "fsdp/base/error.h"
#include "fsdp/base/glob.h"

namespace fsdp {

namespace {

std::vector<std::string> suffixes_of(const TensorCatalog& catalog) {
  std::vector<std::string> suffixes;
  if (catalog.manifest())
    for (const std::string& moment : catalog.manifest()->optimizer.moments)
      suffixes.push_back("." + moment);
  return suffixes;
}

// Numbers of one kind can be converted into each other without surprise.
bool fits(DType stored, DType wanted) {
  return stored == wanted || (is_floating(stored) && is_floating(wanted));
}

bool matches_any(std::span<const std::string> patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& each) { return matches_glob(each, name); });
}

}  // namespace

void TensorSource::add_reads(FlatRange range, std::byte* into, std::vector<FileRun>& runs) const {
  const std::vector<int64_t> strides = strides_of(shape_);
  for (const Box& box : boxes(shape_, range))
    for (const SectionBox& part : cut_at_sections(sections_, box)) {
      StridedBox target{part.stored, strides, -range.begin};
      for (size_t i = 0; i < strides.size(); ++i)
        target.begin += part.model.offsets[i] * strides[i];
      fsdp::add_runs(*stored_[part.section], target, into, runs);
    }
}

LoadPlan::LoadPlan(const std::string& path, const NameRules& names)
    : catalog_(path),
      names_(names),
      model_(apply(names, catalog_.model())),
      moments_(apply(names, catalog_.moments(), suffixes_of(catalog_))) {
  if (!catalog_.manifest()) return;
  for (const UnitRecord& unit : catalog_.manifest()->units)
    for (const GroupRecord& group : unit.groups)
      for (const GroupRecord::Member& member : group.members)
        for (const std::string& alias : member.aliases) stored_under_[alias] = member.name;
}

const CatalogTensor* LoadPlan::find_stored(TensorSet& set, const std::string& name,
                                           const std::string& suffix,
                                           std::span<const std::string> aliases) {
  std::vector<std::string> candidates = {name};
  candidates.insert(candidates.end(), aliases.begin(), aliases.end());
  if (const auto shared = stored_under_.find(name); shared != stored_under_.end())
    candidates.push_back(shared->second);
  const CatalogTensor* found = nullptr;
  for (const std::string& each : candidates) {
    const auto stored = set.find(each + suffix);
    if (stored == set.end()) continue;
    is_used_[stored->first] = true;  // of two names of one tensor both are known
    if (found == nullptr) found = &stored->second;
  }
  return found;
}

std::vector<TensorSource> LoadPlan::find(TensorSet& set, std::span<const WantedTensor> wanted,
                                         const std::string& suffix) {
  std::vector<TensorSource> sources;
  for (const WantedTensor& tensor : wanted) {
    TensorSource& source = sources.emplace_back();
    source.shape_ = tensor.shape;
    source.sections_ = names_.sections(tensor.name, tensor.shape);
    const bool is_fused = source.sections_.size() > 1;
    for (const TensorSection& section : source.sections_) {
      const CatalogTensor* stored = find_stored(
          set, section.name, suffix,
          is_fused ? std::span<const std::string>() : std::span<const std::string>(tensor.aliases));
      if (stored == nullptr) {
        missing_.push_back(section.name + suffix);
        continue;
      }
      if (stored->tensor.shape != section.shape)
        wrong_shape_.push_back(concat(section.name, suffix, " ", list_text(stored->tensor.shape),
                                      " instead of ", list_text(section.shape)));
      const DType expected = source.stored_.empty() ? tensor.dtype : source.dtype();
      if (!fits(stored->tensor.dtype, tensor.dtype) ||
          (!source.stored_.empty() && stored->tensor.dtype != expected))
        wrong_type_.push_back(concat(section.name, suffix, " ", name_of(stored->tensor.dtype),
                                     " instead of ", name_of(expected)));
      source.stored_.push_back(stored);
    }
    // Of a fused tensor some sections would not do.
    if (source.stored_.size() < source.sections_.size()) source.stored_.clear();
  }
  return sources;
}

std::vector<TensorSource> LoadPlan::find_model(std::span<const WantedTensor> wanted) {
  return find(model_, wanted, "");
}

std::vector<TensorSource> LoadPlan::find_moments(std::span<const WantedTensor> wanted,
                                                 const std::string& moment) {
  return find(moments_, wanted, "." + moment);
}

void LoadPlan::check(const LoadTolerance& tolerance) {
  // Whoever loads weights alone has no use for moments.
  const bool wants_moments = std::any_of(moments_.begin(), moments_.end(), [&](const auto& each) {
    return is_used_.count(each.first) > 0;
  });
  for (const TensorSet* set : {&model_, wants_moments ? &moments_ : nullptr})
    if (set != nullptr)
      for (const auto& [name, ignored] : *set)
        if (is_used_.count(name) == 0) extra_.push_back(name);

  std::vector<std::string> not_allowed;
  for (const std::string& name : missing_)
    if (!matches_any(tolerance.allow_missing, name)) not_allowed.push_back(name);
  std::vector<std::string> faults;
  if (!not_allowed.empty())
    faults.push_back(concat("it lacks ", some_of(not_allowed),
                            moments_.empty() && model_.size() == is_used_.size()
                                ? " (it holds no optimizer state: load weights alone)"
                                : " (allow_missing takes patterns of what may keep its value)"));
  if (!tolerance.allows_extra && !extra_.empty())
    faults.push_back(concat("it also has ", some_of(extra_),
                            " (allow_extra ignores what the model does not have)"));
  if (!wrong_shape_.empty()) faults.push_back(concat("other shapes have ", some_of(wrong_shape_)));
  if (!wrong_type_.empty()) faults.push_back(concat("other types have ", some_of(wrong_type_)));
  FSDP_CHECK(faults.empty(), catalog_.path(), " does not fit this model: ", join(faults, "; "));
}

}  // namespace fsdp
