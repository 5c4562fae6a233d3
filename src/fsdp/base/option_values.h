// Option values from their text; an error names the option, the value and what it must be.
//
// Options are taken as text and converted here, because the parser's own conversion errors do not
// say which values are right.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"

namespace fsdp {

// "--ranks is 'x'; RULE"
[[noreturn]] void refuse_option(const std::string& option, const std::string& value,
                                const std::string& rule);

// A whole number from `minimum` to `maximum`.
int64_t parse_whole_number(const std::string& option, const std::string& value, int64_t minimum,
                           int64_t maximum);

// "4GiB", "512 MiB", "1.5e9", "800000000": bytes, with powers of two (KiB, MiB, GiB, TiB) or of ten
// (KB, MB, GB, TB).
int64_t parse_bytes(const std::string& option, const std::string& value);

// A number from `minimum` to `maximum`; neither NaN nor infinite.
double parse_number(const std::string& option, const std::string& value, double minimum,
                    double maximum);

// The shortest text that reads back as the same number: no bit of a difference is lost.
std::string number_text(double value);

// A floating dtype by name; `absent` ("none") is nullopt.
std::optional<DType> parse_dtype_or(const std::string& option, const std::string& value,
                                    const std::string& absent);

// UsageError for none or several.
const std::string& the_only_text(const std::string& option, const std::vector<std::string>& texts);

// The index of the value in `choices`; an unknown one is answered with the nearest.
size_t parse_choice(const std::string& option, const std::string& value,
                    std::span<const std::string> choices);

}  // namespace fsdp
