#include "fsdp/base/env.h"

#include <cmath>
#include <cstdlib>

#include "fsdp/base/check.h"

namespace fsdp {

std::optional<std::string> env_text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

double env_seconds(const char* name, double fallback) {
  const std::optional<std::string> text = env_text(name);
  if (!text) return fallback;
  char* stop = nullptr;
  const double value = std::strtod(text->c_str(), &stop);
  FSDP_CHECK(*stop == '\0' && std::isfinite(value) && value > 0, "environment variable ", name,
             " is '", *text, "': it must be a number of seconds above 0");
  return value;
}

double env_bytes_per_second(const char* name, double fallback) {
  const std::optional<std::string> text = env_text(name);
  if (!text) return fallback;
  char* stop = nullptr;
  double value = std::strtod(text->c_str(), &stop);
  const std::string_view unit = stop;
  const bool known = unit.empty() || unit == "KB" || unit == "MB" || unit == "GB";
  if (unit == "KB") value *= 1e3;
  if (unit == "MB") value *= 1e6;
  if (unit == "GB") value *= 1e9;
  FSDP_CHECK(known && std::isfinite(value) && value > 0, "environment variable ", name, " is '",
             *text,
             "': it must be bytes per second above 0, alone or with KB, MB or GB, such as 1.25GB");
  return value;
}

size_t env_choice(const char* name, std::span<const std::string> choices, size_t fallback) {
  const std::optional<std::string> text = env_text(name);
  if (!text) return fallback;
  for (size_t i = 0; i < choices.size(); ++i)
    if (choices[i] == *text) return i;
  throw Error(concat("environment variable ", name, " is '", *text, "': it must be one of ",
                     join(choices, ", ")));
}

}  // namespace fsdp
