#include "fsdp/checkpoint/plain_path.h"

#include <algorithm>
#include <cstddef>

namespace fsdp {

bool is_plain_name(std::string_view name) {
  if (name.empty() || name == "." || name == "..") return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F && c != '\\' && c != '/';
  });
}

bool is_plain_path(std::string_view path) {
  for (;;) {
    const size_t end = path.find('/');
    if (!is_plain_name(path.substr(0, end))) return false;
    if (end == std::string_view::npos) return true;
    path.remove_prefix(end + 1);
  }
}

}  // namespace fsdp
