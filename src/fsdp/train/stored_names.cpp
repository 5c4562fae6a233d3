#include "fsdp/train/stored_names.h"

#include <utility>
#include <vector>

namespace fsdp::train {

NameRules stored_name_rules(const LanguageModel& model) {
  std::vector<NameRule> rules;
  for (const StoredName& name : model.stored_names())
    rules.push_back(
        {.title = "published name", .pattern = name.in_tree, .sections = {{.name = name.stored}}});
  return NameRules(std::move(rules));
}

}  // namespace fsdp::train
