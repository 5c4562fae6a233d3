#include "fsdp/base/option_values.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/foreign_words.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

struct ByteUnit {
  const char* suffix;
  double bytes;
};

constexpr std::array<ByteUnit, 9> kByteUnits = {{
    {"KiB", 0x1p10},
    {"MiB", 0x1p20},
    {"GiB", 0x1p30},
    {"TiB", 0x1p40},
    {"KB", 1e3},
    {"MB", 1e6},
    {"GB", 1e9},
    {"TB", 1e12},
    {"B", 1},
}};

}  // namespace

std::string number_text(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

void refuse_option(const std::string& option, const std::string& value, const std::string& rule) {
  throw UsageError(concat(option, " is '", value, "'; ", rule));
}

namespace {

// "15T", "1.5B": thousands, millions, billions and trillions. nullopt: no such number, or no whole
// one.
std::optional<int64_t> suffixed_number(const std::string& value) {
  constexpr std::array<std::pair<char, double>, 4> kSuffixes = {
      {{'K', 1e3}, {'M', 1e6}, {'B', 1e9}, {'T', 1e12}}};
  for (const auto& [suffix, factor] : kSuffixes) {
    if (!value.ends_with(suffix)) continue;
    double number = 0;
    const char* end = value.data() + value.size() - 1;
    const auto [stop, error] = std::from_chars(value.data(), end, number);
    number *= factor;
    if (error != std::errc{} || stop != end || !(std::abs(number) < 0x1p62)) return std::nullopt;
    return number == std::round(number) ? std::optional(std::llround(number)) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

int64_t parse_whole_number(const std::string& option, const std::string& value, int64_t minimum,
                           int64_t maximum) {
  int64_t number = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  const std::optional<int64_t> whole =
      error == std::errc{} && stop == end ? number : suffixed_number(value);
  if (!whole || *whole < minimum || *whole > maximum)
    refuse_option(option, value,
                  concat("it must be a whole number from ", minimum, " to ", maximum));
  return *whole;
}

int64_t parse_bytes(const std::string& option, const std::string& value) {
  std::string digits = value;
  double unit_bytes = 1;
  for (const ByteUnit& unit : kByteUnits) {
    if (!digits.ends_with(unit.suffix)) continue;
    unit_bytes = unit.bytes;
    digits.resize(digits.size() - std::string_view(unit.suffix).size());
    break;
  }
  while (digits.ends_with(' ')) digits.pop_back();
  double number = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number);
  const double bytes = number * unit_bytes;
  const bool is_number = error == std::errc{} && stop == end;
  // Far below the largest int64_t, so that sums of such numbers fit, too.
  if (is_number && bytes >= 0x1p62)
    refuse_option(option, value, "no machine has so many bytes; use a size such as 4GiB");
  if (!is_number || !(bytes >= 1))  // NaN, too
    refuse_option(option, value, "it must be a size above 0 such as 4GiB, 512MiB or 800000000");
  return std::llround(bytes);
}

double parse_number(const std::string& option, const std::string& value, double minimum,
                    double maximum) {
  double number = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc{} || stop != end || !(number >= minimum && number <= maximum))
    refuse_option(option, value, concat("it must be a number from ", minimum, " to ", maximum));
  return number;
}

std::optional<DType> parse_dtype_or(const std::string& option, const std::string& value,
                                    const std::string& absent) {
  std::vector<std::string> names;
  for (const DType dtype : all_dtypes())
    if (is_floating(dtype)) names.emplace_back(name_of(dtype));
  names.push_back(absent);
  const size_t choice = parse_choice(option, value, names);
  if (choice + 1 == names.size()) return std::nullopt;
  return parse_dtype(names[choice]);
}

const std::string& the_only_text(const std::string& option, const std::vector<std::string>& texts) {
  if (texts.size() != 1)
    throw UsageError(concat(option, " is given ", texts.size(),
                            " values; give the option once, with one value"));
  return texts.front();
}

size_t parse_choice(const std::string& option, const std::string& value,
                    std::span<const std::string> choices) {
  const auto found = std::find(choices.begin(), choices.end(), value);
  if (found != choices.end()) return static_cast<size_t>(found - choices.begin());
  const std::string meant = meant_text(value, choices);
  refuse_option(option, value,
                concat(meant, meant.empty() ? "use" : "Use", " one of ", join(choices, ", ")));
}

}  // namespace fsdp
