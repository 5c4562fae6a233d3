#include "fsdp/data/data_position.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "fsdp/base/error.h"
#include "fsdp/base/json_fields.h"

namespace fsdp {
namespace {

constexpr const char* kFormat = "fsdp-data-position";
constexpr int64_t kVersion = 1;

// JSON numbers of other programs have 53 bits.
uint64_t hexadecimal(const JsonFields& fields, const char* field) {
  const std::string text = fields.text(field);
  uint64_t value = 0;
  const char* const end = text.data() + text.size();
  if (text.size() == 18 && text.starts_with("0x")) {
    const auto [stop, error] = std::from_chars(text.data() + 2, end, value, 16);
    if (error == std::errc{} && stop == end && fingerprint_text(value) == text) return value;
  }
  fields.refuse(field, "it must be 0x and 16 hexadecimal digits");
}

int64_t at_least(const JsonFields& fields, const char* field, int64_t minimum) {
  const int64_t value = fields.integer(field);
  if (value < minimum) fields.refuse(field, concat("it must be at least ", minimum));
  return value;
}

[[noreturn]] void refuse_other(const std::string& what, const std::string& before,
                               const std::string& now, const std::string& fix) {
  throw UsageError(concat(what, " was ", before, " when the run was saved and is ", now,
                          " now, so its place in the data cannot be found; ", fix,
                          ", or begin the data anew (--restart-data)"));
}

}  // namespace

std::string to_json(const DataPosition& position) {
  const nlohmann::ordered_json json = {{"format", kFormat},
                                       {"version", kVersion},
                                       {"windows_used", position.windows_used},
                                       {"seed", fingerprint_text(position.seed)},
                                       {"sequence", position.sequence},
                                       {"num_windows", position.num_windows},
                                       {"fingerprint", fingerprint_text(position.fingerprint)}};
  return json.dump();
}

DataPosition parse_data_position(const std::string& text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  const JsonFields fields(json, source, "");
  if (fields.text("format") != kFormat) fields.refuse("format", concat("it must be ", kFormat));
  if (at_least(fields, "version", 1) != kVersion)
    fields.refuse("version", concat("this program reads ", kVersion, "; use a newer fsdp"));
  fields.allow_only(
      {"format", "version", "windows_used", "seed", "sequence", "num_windows", "fingerprint"});
  return {.windows_used = at_least(fields, "windows_used", 0),
          .seed = hexadecimal(fields, "seed"),
          .sequence = at_least(fields, "sequence", 1),
          .num_windows = at_least(fields, "num_windows", 1),
          .fingerprint = hexadecimal(fields, "fingerprint")};
}

DataPosition first_position(const TokenWindows& windows, uint64_t seed) {
  return {.windows_used = 0,
          .seed = seed,
          .sequence = windows.sequence(),
          .num_windows = windows.num_windows(),
          .fingerprint = windows.corpus().fingerprint()};
}

void check_same_order(const DataPosition& position, const TokenWindows& windows, uint64_t seed) {
  const DataPosition here = first_position(windows, seed);
  if (position.fingerprint != here.fingerprint)
    refuse_other("the data's fingerprint", fingerprint_text(position.fingerprint),
                 fingerprint_text(here.fingerprint), "give the same files in the same order");
  if (position.sequence != here.sequence)
    refuse_other("sequence", concat(position.sequence), concat(here.sequence), "use the same");
  if (position.num_windows != here.num_windows)
    refuse_other("the number of training windows", concat(position.num_windows),
                 concat(here.num_windows), "keep the same share for validation");
  if (position.seed != here.seed)
    refuse_other("the data's seed", concat(position.seed), concat(here.seed), "use the same");
}

}  // namespace fsdp
