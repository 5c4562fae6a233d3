#include "fsdp/nn/config/lora_options.h"

#include <algorithm>
#include <set>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

std::string last_word(std::string_view layer) {
  return std::string(layer.substr(layer.rfind('.') + 1));
}

bool names(const std::string& glob, std::string_view layer) {
  return matches_glob(glob, std::string(layer)) || matches_glob(glob, last_word(layer));
}

}  // namespace

bool LoraOptions::adapts(std::string_view layer) const {
  if (!is_on()) return false;
  return on.empty() || std::any_of(on.begin(), on.end(),
                                   [&](const std::string& glob) { return names(glob, layer); });
}

void LoraOptions::check_used(const std::vector<std::string>& layers) const {
  if (!is_on()) return;
  for (const std::string& glob : on) {
    if (std::any_of(layers.begin(), layers.end(),
                    [&](const std::string& layer) { return names(glob, layer); }))
      continue;
    std::set<std::string> words;
    for (const std::string& layer : layers) words.insert(last_word(layer));
    throw UsageError(concat("--lora-on has '", glob,
                            "', which names no linear layer of the model's blocks; they are ",
                            join(std::vector<std::string>(words.begin(), words.end()), ", ")));
  }
}

}  // namespace fsdp
