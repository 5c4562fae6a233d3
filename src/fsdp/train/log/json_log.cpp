#include "fsdp/train/log/json_log.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/base/version.h"

namespace fsdp::train {

namespace {

using Json = nlohmann::ordered_json;

// --- the fields of records -----------------------------------------------------------------------

enum class Shown {
  kExactly,   // reads back as the same number
  kMeasured,  // in few digits: more would be noise
  kIfAny,     // measured, and left out where it is 0
};

template <typename Record, typename Kind>
concept RecordOf = std::same_as<std::remove_const_t<Record>, Kind>;

// each_field() calls use(key, field, shown) for the fields of a record, in the order of its line,
// for writing and for reading.

template <RecordOf<StepRecord> Record, typename Use>
void each_field(Record& record, const Use& use) {
  use("step", record.step, Shown::kExactly);
  use("total_steps", record.total_steps, Shown::kExactly);
  use("loss", record.loss, Shown::kExactly);
  use("loss_z", record.loss_z, Shown::kMeasured);
  use("lr", record.learning_rate, Shown::kExactly);
  use("grad_norm", record.gradient_norm, Shown::kExactly);
  use("ms", record.milliseconds, Shown::kMeasured);
  use("overhead_ms", record.overhead_milliseconds, Shown::kMeasured);
  use("tokens_per_s", record.tokens_per_second, Shown::kMeasured);
  use("tflops", record.teraflops, Shown::kIfAny);
  use("mfu", record.mfu, Shown::kIfAny);
  use("peak_bytes", record.peak_bytes, Shown::kExactly);
  use("tokens", record.tokens, Shown::kExactly);
  use("skipped", record.is_skipped, Shown::kIfAny);
  use("terms", record.terms, Shown::kIfAny);
}

template <RecordOf<ValidationRecord> Record, typename Use>
void each_field(Record& record, const Use& use) {
  use("step", record.step, Shown::kExactly);
  use("loss", record.loss, Shown::kExactly);
  use("tokens", record.tokens, Shown::kExactly);
  use("ms", record.milliseconds, Shown::kMeasured);
}

template <RecordOf<CheckpointRecord> Record, typename Use>
void each_field(Record& record, const Use& use) {
  use("step", record.step, Shown::kExactly);
  use("path", record.path, Shown::kExactly);
  use("bytes", record.bytes, Shown::kExactly);
  use("blocked_ms", record.blocked_milliseconds, Shown::kMeasured);
  use("ms", record.milliseconds, Shown::kMeasured);
}

template <RecordOf<EndRecord> Record, typename Use>
void each_field(Record& record, const Use& use) {
  use("step", record.step, Shown::kExactly);
  use("num_steps", record.num_steps, Shown::kExactly);
  use("seconds", record.seconds, Shown::kMeasured);
  use("stopped_by", record.stopped_by, Shown::kExactly);
}

constexpr std::array<const char*, std::variant_size_v<LogRecord>> kKinds = {
    "run", "step", "validation", "checkpoint", "end"};

// --- writing -------------------------------------------------------------------------------------

Json json_of(const auto& value, Shown) { return value; }
Json json_of(double value, Shown shown) {
  return shown == Shown::kExactly ? value : in_digits(value, 6);
}
Json json_of(const std::vector<NamedValue>& terms, Shown) {
  Json json = Json::object();
  for (const NamedValue& term : terms) json[term.name] = term.value;
  return json;
}

void add_fields(Json& line, const auto& record) {
  each_field(record, [&](const char* key, const auto& value, Shown shown) {
    if (shown != Shown::kIfAny || value != std::remove_cvref_t<decltype(value)>())
      line[key] = json_of(value, shown);
  });
}

void add_fields(Json& line, const RunFacts& facts) {
  Json settings = Json::object();
  Json changed = Json::array();
  for (const SettingRow& row : facts.settings) {
    settings[row.name] = row.value;
    if (row.is_changed) changed.push_back(row.name);
  }
  Json environment = Json::object();
  for (const EnvironmentRow& row : facts.environment) environment[row.name] = row.value;
  Json forecast = Json::object();
  for (const MemoryRow& row : facts.memory)
    if (row.forecast_bytes != kUnknownBytes) forecast[row.kind] = row.forecast_bytes;
  line.update({{"step", facts.resumed_step},
               {"title", facts.title},
               {"version", FSDP_VERSION},
               {"settings", settings},
               {"changed", changed},
               {"environment", environment},
               {"forecast_bytes", forecast}});
}

// --- reading back --------------------------------------------------------------------------------

// Fields of a wrong type stay as they are: somebody else may have written the line.
void take(const Json& json, int64_t& field) {
  if (json.is_number_integer()) field = json.get<int64_t>();
}
void take(const Json& json, bool& field) { field = json == Json(true); }
void take(const Json& json, std::string& field) {
  if (json.is_string()) field = json.get<std::string>();
}
// A number that is not finite was written as null.
void take(const Json& json, double& field) {
  field = json.is_number() ? json.get<double>() : std::numeric_limits<double>::quiet_NaN();
}
void take(const Json& json, std::vector<NamedValue>& field) {
  if (json.is_object())
    for (const auto& [name, value] : json.items()) take(value, field.emplace_back(name).value);
}

template <typename Record>
LogRecord record_of(const Json& json) {
  Record record;
  each_field(record, [&](const char* key, auto& field, Shown) {
    if (const auto found = json.find(key); found != json.end()) take(*found, field);
  });
  return record;
}

// Calls use(name, text) for the texts of an object.
void each_text(const Json& json, const char* key, const auto& use) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_object()) return;
  for (const auto& [name, value] : found->items())
    if (value.is_string()) use(name, value.template get<std::string>());
}

template <>
LogRecord record_of<RunFacts>(const Json& json) {
  RunFacts facts;
  take(json.value("step", Json()), facts.resumed_step);
  take(json.value("title", Json()), facts.title);
  const Json changed = json.value("changed", Json());
  each_text(json, "settings", [&](const std::string& name, std::string value) {
    const bool is_changed = std::find(changed.begin(), changed.end(), name) != changed.end();
    facts.settings.push_back({.name = name, .value = std::move(value), .is_changed = is_changed});
  });
  each_text(json, "environment", [&](const std::string& name, std::string value) {
    facts.environment.push_back({name, std::move(value)});
  });
  return facts;
}

// --- the file ------------------------------------------------------------------------------------

// Calls `use(line)` for each line; the last one may lack its line break.
void for_each_line(const std::string& path, const auto& use) {
  std::ifstream file(path);
  FSDP_CHECK(file.is_open(), path, ": cannot be read");
  for (std::string line; std::getline(file, line);) use(line);
}

// Writes the kept lines beside the old file, then renames: a crash leaves one of the two.
void keep_until(int64_t resumed_step, const std::string& path, const LogRecordSink& restored) {
  const std::string temporary = concat(path, ".tmp");
  FileWriter writer(temporary);
  for_each_line(path, [&](const std::string& line) {
    const std::optional<LogRecord> record = parse_log_line(line);
    if (!record || step_of(*record) > resumed_step) return;
    if (restored) restored(*record);
    writer.write(std::as_bytes(std::span<const char>(line + '\n')));
  });
  writer.commit();
  rename_durably(temporary, path);
}

// Makes an old file ready for appending.
const std::string& prepared(const std::string& path, int64_t resumed_step,
                            const LogRecordSink& restored) {
  if (!is_regular_file(path)) return path;
  if (resumed_step > 0)
    keep_until(resumed_step, path, restored);
  else
    rename_durably(path, concat(path, ".previous"));
  return path;
}

}  // namespace

double in_digits(double value, int digits) {
  if (!std::isfinite(value)) return value;
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.*g", digits, value);
  return std::strtod(text.data(), nullptr);
}

int64_t step_of(const LogRecord& record) {
  return std::visit(
      [](const auto& each) {
        if constexpr (requires { each.resumed_step; })
          return each.resumed_step;
        else
          return each.step;
      },
      record);
}

std::string log_line(const LogRecord& record, double time) {
  Json line = {{"kind", kKinds[record.index()]}};
  std::visit([&](const auto& each) { add_fields(line, each); }, record);
  line["time"] = std::round(time * 1e3) / 1e3;
  // Text from outside (paths, names of hosts) need not be UTF-8.
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<LogRecord> parse_log_line(std::string_view line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  constexpr std::array<LogRecord (*)(const Json&), kKinds.size()> kReaders = {
      record_of<RunFacts>, record_of<StepRecord>, record_of<ValidationRecord>,
      record_of<CheckpointRecord>, record_of<EndRecord>};
  const Json kind = json.value("kind", Json());
  for (size_t i = 0; i < kKinds.size(); ++i)
    if (kind == kKinds[i]) return kReaders[i](json);
  return std::nullopt;
}

std::vector<LogRecord> read_log(const std::string& path) {
  std::vector<LogRecord> records;
  for_each_line(path, [&](const std::string& line) {
    std::optional<LogRecord> record = parse_log_line(line);
    if (!record) return;
    // A later part of the run did these steps again.
    if (const auto* start = std::get_if<RunFacts>(&*record))
      std::erase_if(records,
                    [&](const LogRecord& each) { return step_of(each) > start->resumed_step; });
    records.push_back(std::move(*record));
  });
  return records;
}

JsonLog::JsonLog(const std::string& path, int64_t resumed_step, const LogRecordSink& restored)
    : file_(prepared(path, resumed_step, restored), "--log") {}

void JsonLog::write(std::string line) {
  line += '\n';
  file_.append(line);
}

}  // namespace fsdp::train
