#include "fsdp/checkpoint/load_plan.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// Numbers of one kind can be converted into each other without surprise.
bool fits(DType stored, DType wanted) {
  return stored == wanted || (is_floating(stored) && is_floating(wanted));
}

}  // namespace

void TensorSource::add_reads(FlatRange range, std::byte* into, std::vector<FileRun>& runs) const {
  const std::vector<int64_t> strides = strides_of(shape_);
  for (const OwnedBox& box : owned_boxes(owned_, shape_, range))
    for (const SectionBox& part : cut_at_sections(sections_, box.whole))
      fsdp::add_runs(*stored_[part.section],
                     {part.stored, strides, place_of(part, box, strides) - range.begin}, into,
                     runs);
}

LoadPlan::LoadPlan(const std::string& path, NameRules names)
    : catalog_(path),
      names_(std::move(names)),
      stored_under_(names_of_shared(catalog_, names_)),
      model_(apply(names_, catalog_.model())),
      moments_(moments_of(catalog_, names_)) {}

const CatalogTensor* LoadPlan::find_stored(TensorSet& set, std::span<const std::string> names,
                                           const std::string& suffix) {
  const CatalogTensor* found = nullptr;
  for (const std::string& each : names) {
    const auto stored = set.find(each + suffix);
    if (stored == set.end()) continue;
    is_used_[stored->first] = true;  // both names of one tensor count as used
    if (found == nullptr) found = &stored->second;
  }
  return found;
}

// The tensor's own name first, then its aliases in the model, then those in the checkpoint.
std::vector<std::vector<std::string>> LoadPlan::names_of(
    const WantedTensor& tensor, std::span<const TensorSection> sections) const {
  std::vector<std::vector<std::string>> names;
  for (const TensorSection& section : sections) names.push_back({section.name});
  for (const std::string& alias : tensor.aliases) {
    const std::vector<TensorSection> others = names_.sections(alias, tensor.shape);
    for (size_t i = 0; i < others.size() && others.size() == sections.size(); ++i)
      names[i].push_back(others[i].name);
  }
  for (std::vector<std::string>& each : names)
    if (const auto shared = stored_under_.find(each.front()); shared != stored_under_.end())
      each.push_back(shared->second);
  return names;
}

std::vector<TensorSource> LoadPlan::find(TensorSet& set, std::span<const WantedTensor> wanted,
                                         const std::string& suffix) {
  std::vector<TensorSource> sources;
  for (const WantedTensor& tensor : wanted) {
    TensorSource& source = sources.emplace_back();
    if (tensor.keeps_value) continue;
    source.owned_ = tensor.owned;
    source.shape_ = owned_shape(tensor.owned, tensor.shape);
    source.sections_ = names_.sections(tensor.name, tensor.shape);
    const std::vector<std::vector<std::string>> names = names_of(tensor, source.sections_);
    for (size_t i = 0; i < source.sections_.size(); ++i) {
      const TensorSection& section = source.sections_[i];
      const CatalogTensor* stored = find_stored(set, names[i], suffix);
      if (stored == nullptr) {
        missing_.push_back(section.name + suffix);
        missing_from_.push_back({tensor.name + suffix, !suffix.empty()});
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
    // A fused tensor needs all of its sections.
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

std::vector<std::string> LoadPlan::not_allowed(const LoadTolerance& tolerance) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < missing_.size(); ++i)
    if (!matches_any_glob(tolerance.allow_missing, missing_[i]) &&
        !matches_any_glob(tolerance.allow_missing, missing_from_[i].model_name))
      names.push_back(missing_[i]);
  return names;
}

void LoadPlan::check(const LoadTolerance& tolerance) {
  // Moments are no extra tensors for a caller that loads weights alone.
  const bool wants_moments = std::any_of(moments_.begin(), moments_.end(), [&](const auto& each) {
    return is_used_.count(each.first) > 0;
  });
  for (const TensorSet* set : {&model_, wants_moments ? &moments_ : nullptr})
    if (set != nullptr)
      for (const auto& [name, ignored] : *set)
        if (is_used_.count(name) == 0 && !matches_any_glob(tolerance.ignored, name))
          extra_.push_back(name);

  std::vector<std::string> faults;
  const bool lacks_weights = std::any_of(missing_from_.begin(), missing_from_.end(),
                                         [](const Origin& each) { return !each.is_moment; });
  const char* const how_missing =
      moments_.empty() && !lacks_weights ? " (it holds no optimizer state: load weights alone)"
      : tolerance.is_offered ? " (allow_missing takes patterns of what may keep its value)"
                             : "";
  const char* const how_extra =
      tolerance.is_offered ? " (allow_extra ignores what the model does not have)" : "";
  if (const std::vector<std::string> lacks = not_allowed(tolerance); !lacks.empty())
    faults.push_back(concat("it lacks ", some_of(lacks), how_missing));
  if (!tolerance.allows_extra && !extra_.empty())
    faults.push_back(concat("it also has ", some_of(extra_), how_extra));
  if (!wrong_shape_.empty()) faults.push_back(concat("other shapes have ", some_of(wrong_shape_)));
  if (!wrong_type_.empty()) faults.push_back(concat("other types have ", some_of(wrong_type_)));
  FSDP_CHECK(faults.empty(), catalog_.path(), " does not fit this model: ", join(faults, "; "),
             tolerance.is_offered ? "" : "; give the weights of this model, or name their model");
}

}  // namespace fsdp
