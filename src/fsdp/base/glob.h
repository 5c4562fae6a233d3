// Patterns over names: `*` is any text, also none and also over dots, `?` is one character.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fsdp {

// Whether the pattern describes the whole of `text`.
bool matches_glob(std::string_view pattern, std::string_view text);

// How many characters of `text` must be changed, added or left out until the pattern describes it.
int64_t distance_to_glob(std::string_view pattern, std::string_view text);

// The candidate that is nearest to a pattern, or "" when none is near enough to be what was meant.
std::string nearest_to_glob(std::string_view pattern, std::span<const std::string> candidates);

}  // namespace fsdp
