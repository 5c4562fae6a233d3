// Models by name, from the catalog, or from files: a published config.json, or a list of units and
// tensors of one's own.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fsdp/plan/model_shape.h"

namespace fsdp {

// The models that planning knows by name, in catalog order.
std::vector<std::string> model_names();

// Throws UsageError with the nearest name when there is no such model.
ModelShape model_by_name(std::string_view name);

// Reads either form:
//   {"model_type": "llama" | "qwen3_next" | ..., ...}: known_model_types()
//   {"name": "mine", "units": [{"name": "block", "tensors": [{"name": "w", "shape": [4, 4]}]}]}
// In the second a tensor may also name its "dtype" and the model the order of "uses" (unit names;
// default: each unit once, in order). `source` is what errors call the text, usually its path.
// Throws UsageError with source, field, value and fix.
ModelShape parse_model(std::string_view json_text, const std::string& source);

// Whether parse_model() knows the "model_type" of a config.json.
bool is_known_model_type(std::string_view model_type);

// The file that is meant by a path (it ends in .json or contains a slash), or by a directory with a
// config.json; "": a name.
std::string config_path(const std::string& name_or_path);

// Such a file, else a name of the catalog.
ModelShape load_model(const std::string& name_or_path);

}  // namespace fsdp
