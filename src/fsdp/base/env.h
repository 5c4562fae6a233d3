// Environment variables, read with a type and an error that names the variable.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace fsdp {

// Unset and empty are both "not given".
std::optional<std::string> env_text(const char* name);

// A number of seconds, > 0.
double env_seconds(const char* name, double fallback);

// A rate above 0 in bytes per second, alone or with KB, MB or GB (powers of 1000): "1.25GB".
double env_bytes_per_second(const char* name, double fallback);

// The index of the value among `choices`, or `fallback` when not given.
size_t env_choice(const char* name, std::span<const std::string> choices, size_t fallback);

}  // namespace fsdp
