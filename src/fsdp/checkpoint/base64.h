// Bytes as text, for JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fsdp {

std::string base64(std::string_view bytes);

// nullopt for what base64() does not write.
std::optional<std::string> from_base64(std::string_view text);

}  // namespace fsdp
