#include "fsdp/shard/module_units.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/shard/call_unit.h"
#include "fsdp/shard/layer_weights.h"
#include "fsdp/shard/module_roles.h"

namespace fsdp {

namespace {

constexpr int32_t kOutside = -1;

// Matches part by part, so that "layers.*" means the layers and not the modules inside them.
bool describes(std::string_view pattern, std::string_view name) {
  while (true) {
    const size_t pattern_end = pattern.find('.');
    const size_t name_end = name.find('.');
    if (!matches_glob(pattern.substr(0, pattern_end), name.substr(0, name_end))) return false;
    if (pattern_end == std::string_view::npos || name_end == std::string_view::npos)
      return pattern_end == name_end;
    pattern.remove_prefix(pattern_end + 1);
    name.remove_prefix(name_end + 1);
  }
}

// Names of units are paths in the tree, of which the root has none; models of others often have a
// child called "model".
std::string name_of_root(const torch::nn::Module& model) {
  return model.named_children().contains("model") ? "(model)" : "model";
}

bool is_quantizable(const torch::nn::Module& module, const std::string& parameter) {
  const auto* quantizable = dynamic_cast<const QuantizableModule*>(&module);
  return quantizable != nullptr && quantizable->is_quantizable(parameter);
}

std::vector<int64_t> matrix_rows(const torch::nn::Module& module, const std::string& parameter) {
  const auto* declares = dynamic_cast<const MatrixModule*>(&module);
  return declares == nullptr ? std::vector<int64_t>() : declares->matrix_rows(parameter);
}

class Finder {
 public:
  explicit Finder(const ShardOptions& options)
      : named_(options.units), is_used_(named_.size(), false), placements_(options) {}

  ModuleUnits find(const std::shared_ptr<torch::nn::Module>& model) {
    visit(model, "", kOutside);
    FSDP_CHECK(!owners_.empty(), "the model has no parameters, so there is nothing to shard");
    check_names_are_used(*model);
    placements_.check_all_are_used(model->named_parameters().keys());
    if (!outside_.parameters.empty()) {
      outside_.name = "(outside units)";
      units_.push_back(std::move(outside_));
    }
    return {keep_useful(), std::move(modules_)};
  }

 private:
  struct Owner {
    int32_t unit;
    size_t parameter;
  };

  FoundUnit& unit_at(int32_t index) {
    return index == kOutside ? outside_ : units_[static_cast<size_t>(index)];
  }

  void visit(const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
             int32_t unit) {
    auto* base = dynamic_cast<UnitBase*>(module.get());
    const bool is_named = is_described(name);
    if (base != nullptr || is_named) {
      if (unit != kOutside) unit_at(unit).encloses_units = true;
      unit = index_of(*module, base, name, unit);
    }
    const std::string prefix = name.empty() ? "" : name + ".";
    // Owners follow the order of the tree, initialisation that of construction.
    for (const auto& item : module->named_parameters(/*recurse=*/false))
      if (item.value().defined())
        add({{prefix + item.key()},
             item.value(),
             placements_.placement_of(prefix + item.key(), declared_placement(*module, item.key())),
             is_quantizable(*module, item.key()),
             matrix_rows(*module, item.key())},
            unit);
    for (const auto& child : module->named_children())
      visit(child.value(), prefix + child.key(), unit);
    const bool matters = !module->named_parameters(false).is_empty() ||
                         !module->named_buffers(false).is_empty() || wants_ranks(*module);
    if (matters && visited_.insert(module.get()).second) modules_.push_back({name, module});
  }

  // A unit that is registered under several names is one unit, with its first name.
  int32_t index_of(torch::nn::Module& module, UnitBase* base, const std::string& name,
                   int32_t parent) {
    const auto [it, is_new] = indices_.try_emplace(&module, static_cast<int32_t>(units_.size()));
    if (is_new) {
      const bool is_sharded =
          base != nullptr ? base->is_sharded() : named_unit_hooks(module) != nullptr;
      const std::string unit_name = name.empty() ? name_of_root(module) : name;
      FSDP_CHECK(!is_sharded, "unit '", unit_name,
                 "' is already sharded; a model can be sharded once");
      units_.push_back({.name = unit_name,
                        .unit = base,
                        .module = base != nullptr ? nullptr : &module,
                        .parent = parent});
    }
    return it->second;
  }

  bool is_described(const std::string& name) {
    bool any = false;
    for (size_t i = 0; i < named_.size(); ++i) {
      if (name.empty() || !describes(named_[i], name)) continue;
      is_used_[i] = true;
      any = true;
    }
    return any;
  }

  void check_names_are_used(const torch::nn::Module& model) const {
    for (size_t i = 0; i < named_.size(); ++i) {
      if (is_used_[i]) continue;
      const auto depth_of = [](std::string_view name) {
        return std::count(name.begin(), name.end(), '.');
      };
      std::vector<std::string> names;
      for (const auto& item : model.named_modules())
        if (depth_of(item.key()) == depth_of(named_[i])) names.push_back(item.key());
      const std::string guess = nearest_to_glob(named_[i], names);
      throw UsageError(concat("units has '", named_[i],
                              "', but no module of the model is called so",
                              guess.empty() ? "" : concat("; did you mean '", guess, "'?")));
    }
  }

  void add(OwnedParameter parameter, int32_t unit) {
    const auto [it, is_new] = owners_.try_emplace(parameter.tensor.unsafeGetTensorImpl(),
                                                  Owner{unit, unit_at(unit).parameters.size()});
    if (is_new) {
      unit_at(unit).parameters.push_back(std::move(parameter));
      return;
    }
    const Owner owner = it->second;
    OwnedParameter& owned = unit_at(owner.unit).parameters[owner.parameter];
    FSDP_CHECK(owned.declared == parameter.declared, "parameter '", parameter.names.front(),
               "' is shared with '", owned.names.front(),
               "', but the two are declared differently: '", to_text(parameter.declared), "' and '",
               to_text(owned.declared), "'; share it among modules that cut it alike");
    owned.names.push_back(std::move(parameter.names.front()));
    owned.is_quantizable &= parameter.is_quantizable;
    if (owned.matrix_rows != parameter.matrix_rows) owned.matrix_rows.clear();
    // Parameters outside are always whole, and a unit around this one is whole while this one runs.
    if (owner.unit == kOutside || unit == kOutside || is_around(owner.unit, unit)) return;
    std::vector<int32_t>& shares_with = unit_at(unit).shares_with;
    if (std::find(shares_with.begin(), shares_with.end(), owner.unit) == shares_with.end())
      shares_with.push_back(owner.unit);
  }

  bool is_around(int32_t outer, int32_t inner) {
    for (; inner != kOutside; inner = unit_at(inner).parent)
      if (inner == outer) return true;
    return false;
  }

  // Units that own nothing and share nothing stay plain modules.
  std::vector<FoundUnit> keep_useful() {
    std::vector<int32_t> new_index(units_.size(), kOutside);
    std::vector<FoundUnit> kept;
    for (size_t i = 0; i < units_.size(); ++i) {
      if (units_[i].parameters.empty() && units_[i].shares_with.empty()) continue;
      new_index[i] = static_cast<int32_t>(kept.size());
      kept.push_back(units_[i]);
    }
    for (FoundUnit& unit : kept) {
      // The next kept unit around it.
      while (unit.parent != kOutside && new_index[static_cast<size_t>(unit.parent)] == kOutside)
        unit.parent = units_[static_cast<size_t>(unit.parent)].parent;
      if (unit.parent != kOutside) unit.parent = new_index[static_cast<size_t>(unit.parent)];
      for (int32_t& other : unit.shares_with) other = new_index[static_cast<size_t>(other)];
    }
    return kept;
  }

  const std::vector<std::string>& named_;
  std::vector<bool> is_used_;  // by index of named_
  NamedPlacements placements_;
  std::vector<FoundUnit> units_;
  FoundUnit outside_;
  std::vector<FoundModule> modules_;
  std::unordered_map<const void*, Owner> owners_;
  std::unordered_map<const torch::nn::Module*, int32_t> indices_;
  std::unordered_set<const torch::nn::Module*> visited_;
};

}  // namespace

ModuleUnits find_units(const std::shared_ptr<torch::nn::Module>& model,
                       const ShardOptions& options) {
  return Finder(options).find(model);
}

}  // namespace fsdp
