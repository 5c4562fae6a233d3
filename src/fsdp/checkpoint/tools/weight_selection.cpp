#include "fsdp/checkpoint/tools/weight_selection.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "fsdp/base/check.h"
#include "fsdp/base/utf8.h"
#include "fsdp/checkpoint/tools/tensor_numbers.h"

namespace fsdp {

namespace {

// Files of early Llamas hold the frequencies of rotary embeddings, which are computed today.
constexpr std::string_view kRotaryTable = ".rotary_emb.inv_freq";

// Every name of a shared parameter -> its stored name; both after the rules.
std::map<std::string, std::string> stored_names(const TensorCatalog& catalog,
                                                const NameRules& rules) {
  std::map<std::string, std::string> names;
  if (!catalog.manifest()) return names;
  const auto add = [&](const GroupRecord::Member& member, const std::string& alias) {
    const auto from = rules.sections_of_stored(alias, member.shape);
    const auto to = rules.sections_of_stored(member.name, member.shape);
    for (size_t i = 0; i < std::min(from.size(), to.size()); ++i) names[from[i].name] = to[i].name;
  };
  for (const UnitRecord& unit : catalog.manifest()->units)
    for (const GroupRecord& group : unit.groups)
      for (const GroupRecord::Member& member : group.members)
        for (const std::string& alias : member.aliases) add(member, alias);
  return names;
}

// Collects faults of names and shapes, to report them together.
class Fit {
 public:
  Fit(const TensorCatalog& catalog, const TensorSet& model, const ExpectedWeights& expected)
      : catalog_(catalog), model_(model), expected_(expected) {}

  WeightSelection select(const std::map<std::string, std::string>& aliases) {
    for (const NamedShape& wanted : expected_.tensors) {
      auto found = model_.find(wanted.name);
      if (const auto alias = aliases.find(wanted.name);
          found == model_.end() && alias != aliases.end())
        found = model_.find(alias->second);
      if (found == model_.end()) {
        missing_.push_back(wanted.name);
      } else {
        take(wanted, found->second);
      }
    }
    for (const auto& [name, tensor] : model_)
      if (used_.count(name) == 0) leave_out(tensor);
    refuse_faults();
    return std::move(selection_);
  }

 private:
  void take(const NamedShape& wanted, const CatalogTensor& stored) {
    used_.insert(stored.tensor.name);
    if (stored.tensor.shape != wanted.shape)
      wrong_.push_back(concat(wanted.name, " ", list_text(stored.tensor.shape), " instead of ",
                              list_text(wanted.shape)));
    selection_.tensors.push_back(stored);
    selection_.tensors.back().tensor.name = wanted.name;
  }

  void leave_out(const CatalogTensor& tensor) {
    const std::string& name = tensor.tensor.name;
    const bool is_tied_head = expected_.ties_head && name == kHeadName;
    if (!is_tied_head && !name.ends_with(kRotaryTable)) {
      extra_.push_back(name);
      return;
    }
    if (is_tied_head) check_tied(tensor);
    selection_.left_out.push_back(name);
  }

  void check_tied(const CatalogTensor& head) const {
    const auto embedding = model_.find(kEmbeddingName);
    if (embedding == model_.end()) return;  // reported as missing
    const TensorSet first{{kHeadName, head}};
    const TensorSet second{{kHeadName, embedding->second}};
    FSDP_CHECK(differences_of({first, catalog_.files()}, {second, catalog_.files()}).empty(),
               catalog_.path(), ": ", kHeadName, " and ", kEmbeddingName,
               " have different values, but tie_word_embeddings in ", expected_.source,
               " is true; set it to false there, or give a file that says so with --config");
  }

  void refuse_faults() const {
    std::vector<std::string> faults;
    if (!missing_.empty()) faults.push_back(concat("it lacks ", some_of(missing_)));
    if (!extra_.empty()) faults.push_back(concat("it also has ", some_of(extra_)));
    if (!wrong_.empty()) faults.push_back(concat("other shapes have ", some_of(wrong_)));
    FSDP_CHECK(faults.empty(), catalog_.path(), " does not fit ", expected_.source, ": ",
               join(faults, "; "),
               "; give the model's own config.json with --config, or rules for its names with "
               "--names");
  }

  const TensorCatalog& catalog_;
  const TensorSet& model_;
  const ExpectedWeights& expected_;
  std::set<std::string> used_;  // stored names
  std::vector<std::string> missing_;
  std::vector<std::string> extra_;
  std::vector<std::string> wrong_;
  WeightSelection selection_;
};

}  // namespace

WeightSelection select_all(const TensorCatalog& catalog, const TensorSet& model) {
  WeightSelection selection;
  std::set<std::string> taken;
  if (catalog.manifest())
    for (const StoredTensor& tensor : catalog.manifest()->model)
      if (const auto found = model.find(tensor.name); found != model.end()) {
        selection.tensors.push_back(found->second);
        taken.insert(tensor.name);
      }
  const size_t num_known = selection.tensors.size();
  for (const auto& [name, tensor] : model)
    if (taken.count(name) == 0) selection.tensors.push_back(tensor);
  const auto place_of = [](const CatalogTensor& tensor) {
    return tensor.boxes.empty()
               ? std::tuple(size_t{0}, int64_t{0})
               : std::tuple(tensor.boxes.front().file, tensor.boxes.front().data_begin);
  };
  std::stable_sort(
      selection.tensors.begin() + static_cast<std::ptrdiff_t>(num_known), selection.tensors.end(),
      [&](const CatalogTensor& a, const CatalogTensor& b) { return place_of(a) < place_of(b); });
  return selection;
}

WeightSelection select_weights(const TensorCatalog& catalog, const TensorSet& model,
                               const ExpectedWeights& expected, const NameRules& rules) {
  return Fit(catalog, model, expected).select(stored_names(catalog, rules));
}

std::vector<CatalogTensor> apply_in_order(const NameRules& rules,
                                          std::span<const CatalogTensor> tensors) {
  std::vector<CatalogTensor> renamed;
  std::set<std::string> names;
  for (const CatalogTensor& tensor : tensors)
    for (const auto& [name, section] :
         fsdp::apply(rules, TensorSet{{tensor.tensor.name, tensor}})) {
      FSDP_CHECK(names.insert(name).second, "two tensors of the checkpoint are called '",
                 shown(name), "' by the name rules; '", shown(tensor.tensor.name),
                 "' is one of them");
      renamed.push_back(section);
    }
  return renamed;
}

}  // namespace fsdp
