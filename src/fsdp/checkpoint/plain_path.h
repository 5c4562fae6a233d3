// Which paths that files name may be opened: whoever sends a checkpoint must not choose others.
#pragma once

#include <string_view>

namespace fsdp {

// "model/00000-0.safetensors": leads from a directory to something below it, in one way only. No
// "..", ".", doubled or trailing "/", nothing absolute, no backslash, no control character.
bool is_plain_path(std::string_view path);

// One part of such a path.
bool is_plain_name(std::string_view name);

}  // namespace fsdp
