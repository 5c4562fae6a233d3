#include "fsdp/train/log/json_log.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/base/version.h"

namespace fsdp::train {

namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Text from outside (paths, names of hosts) need not be UTF-8.
std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

// An object as text, key after key: a line per step must cost microseconds, and a tree of nodes per
// line costs tens of them.
class Line {
 public:
  explicit Line(std::string_view kind) {
    text_.reserve(384);
    text_ += "{\"kind\":\"";
    text_ += kind;
    text_ += '"';
  }

  void add(std::string_view key, int64_t value) { append(key, value); }

  // The shortest text that reads back as the same number.
  void add_exact(std::string_view key, double value) {
    if (std::isfinite(value))
      append(key, value);
    else
      append_text(key, "null");
  }

  // For measured values, where more digits would be noise.
  void add_measured(std::string_view key, double value) {
    if (std::isfinite(value))
      append(key, value, std::chars_format::general, 6);
    else
      append_text(key, "null");
  }

  void add_time(double time) { append("time", time, std::chars_format::fixed, 3); }
  void add_true(std::string_view key) { append_text(key, "true"); }
  void add_json(std::string_view key, const OrderedJson& value) { append_text(key, dump(value)); }

  void add_terms(const std::vector<NamedValue>& terms) {
    if (terms.empty()) return;
    append_text("terms", "{");
    for (const NamedValue& term : terms) {
      if (text_.back() != '{') text_ += ',';
      text_ += dump(term.name);
      text_ += ':';
      text_ += std::isfinite(term.value) ? dump(term.value) : "null";
    }
    text_ += '}';
  }

  std::string take() {
    text_ += '}';
    return std::move(text_);
  }

 private:
  template <typename Value, typename... Format>
  void append(std::string_view key, Value value, Format... format) {
    std::array<char, 400> digits{};  // a fixed number may have 309 before its point
    const auto result =
        std::to_chars(digits.data(), digits.data() + digits.size(), value, format...);
    append_text(key, std::string_view(digits.data(), result.ptr));
  }

  void append_text(std::string_view key, std::string_view value) {
    text_ += ",\"";
    text_ += key;
    text_ += "\":";
    text_ += value;
  }

  std::string text_;
};

// --- reading back --------------------------------------------------------------------------------

int64_t integer_of(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

// A number that is not finite was written as null.
double number_of(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end()) return 0;
  return found->is_number() ? found->get<double>() : std::numeric_limits<double>::quiet_NaN();
}

std::string text_of(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
}

StepRecord step_record_of(const Json& json) {
  StepRecord record{.step = integer_of(json, "step"),
                    .total_steps = integer_of(json, "total_steps"),
                    .loss = number_of(json, "loss"),
                    .loss_z = number_of(json, "loss_z"),
                    .learning_rate = number_of(json, "lr"),
                    .gradient_norm = number_of(json, "grad_norm"),
                    .milliseconds = number_of(json, "ms"),
                    .overhead_milliseconds = number_of(json, "overhead_ms"),
                    .tokens_per_second = number_of(json, "tokens_per_s"),
                    .teraflops = number_of(json, "tflops"),
                    .mfu = number_of(json, "mfu"),
                    .peak_bytes = integer_of(json, "peak_bytes"),
                    .tokens = integer_of(json, "tokens"),
                    .is_skipped = json.contains("skipped"),
                    .terms = {}};
  if (const auto terms = json.find("terms"); terms != json.end() && terms->is_object())
    for (const auto& term : terms->items())
      record.terms.push_back({term.key(), number_of(*terms, term.key().c_str())});
  return record;
}

// An object whose values are texts, as rows.
template <typename Row, typename Use>
std::vector<Row> rows_of(const Json& json, const char* key, const Use& use) {
  std::vector<Row> rows;
  const auto found = json.find(key);
  if (found == json.end() || !found->is_object()) return rows;
  for (const auto& [name, value] : found->items())
    if (value.is_string()) rows.push_back(use(name, value.template get<std::string>()));
  return rows;
}

RunStart run_start_of(const Json& json) {
  std::vector<std::string> changed;
  if (const auto found = json.find("changed"); found != json.end() && found->is_array())
    for (const Json& name : *found)
      if (name.is_string()) changed.push_back(name.get<std::string>());
  RunStart start{.resumed_step = integer_of(json, "step")};
  start.facts.title = text_of(json, "title");
  start.facts.resumed_step = start.resumed_step;
  start.facts.settings =
      rows_of<SettingRow>(json, "settings", [&](const std::string& name, std::string value) {
        const bool is_changed = std::find(changed.begin(), changed.end(), name) != changed.end();
        return SettingRow{.name = name, .value = std::move(value), .is_changed = is_changed};
      });
  start.facts.environment =
      rows_of<EnvironmentRow>(json, "environment", [](const std::string& name, std::string value) {
        return EnvironmentRow{name, std::move(value)};
      });
  return start;
}

// Calls `use(line, is_whole)` for each line; the last one may lack its line break.
template <typename Use>
void for_each_line(const std::string& path, const Use& use) {
  constexpr int64_t kPieceBytes = int64_t{1} << 20;
  const FileReader reader(path);
  std::string pending;
  std::vector<std::byte> piece;
  for (int64_t offset = 0; offset < reader.bytes(); offset += kPieceBytes) {
    piece.resize(static_cast<size_t>(std::min(kPieceBytes, reader.bytes() - offset)));
    reader.read(offset, piece);
    pending.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    size_t begin = 0;
    for (size_t end = pending.find('\n'); end != std::string::npos;
         end = pending.find('\n', begin)) {
      use(std::string_view(pending).substr(begin, end - begin), true);
      begin = end + 1;
    }
    pending.erase(0, begin);
  }
  if (!pending.empty()) use(std::string_view(pending), false);
}

// An interrupted run leaves steps that are done again, and lines that are no records.
bool is_superseded(const std::optional<LogRecord>& record, int64_t resumed_step) {
  return !record || step_of(*record) > resumed_step;
}

// Writes the kept lines beside the old file, then renames: a crash leaves one of the two.
void rewrite(const std::string& path, int64_t resumed_step) {
  const std::string temporary = concat(path, ".tmp");
  FileWriter writer(temporary);
  std::string kept;
  for_each_line(path, [&](std::string_view line, bool) {
    if (is_superseded(parse_log_line(line), resumed_step)) return;
    kept.assign(line);
    kept += '\n';
    writer.write(std::as_bytes(std::span(kept)));
  });
  writer.commit();
  rename_durably(temporary, path);
}

void resume(const std::string& path, int64_t resumed_step, const LogRecordSink& restored) {
  bool is_intact = true;
  for_each_line(path, [&](std::string_view line, bool is_whole) {
    const std::optional<LogRecord> record = parse_log_line(line);
    const bool is_kept = !is_superseded(record, resumed_step);
    if (is_kept && restored) restored(*record);
    is_intact = is_intact && is_kept && is_whole;
  });
  if (!is_intact) rewrite(path, resumed_step);
}

// Makes an old file ready for appending.
const std::string& prepared(const std::string& path, int64_t resumed_step,
                            const LogRecordSink& restored) {
  if (!is_regular_file(path)) return path;
  if (resumed_step > 0)
    resume(path, resumed_step, restored);
  else
    rename_durably(path, concat(path, ".previous"));
  return path;
}

}  // namespace

std::string run_line(const RunFacts& facts, double time) {
  Line line("run");
  line.add("step", facts.resumed_step);
  line.add_json("title", facts.title);
  line.add_json("version", FSDP_VERSION);
  OrderedJson settings = OrderedJson::object();
  OrderedJson changed = OrderedJson::array();
  for (const SettingRow& row : facts.settings) {
    settings[row.name] = row.value;
    if (row.is_changed) changed.push_back(row.name);
  }
  OrderedJson environment = OrderedJson::object();
  for (const EnvironmentRow& row : facts.environment) environment[row.name] = row.value;
  OrderedJson forecast = OrderedJson::object();
  for (const MemoryRow& row : facts.memory)
    if (row.forecast_bytes != kUnknownBytes) forecast[row.kind] = row.forecast_bytes;
  line.add_json("settings", settings);
  line.add_json("changed", changed);
  line.add_json("environment", environment);
  line.add_json("forecast_bytes", forecast);
  line.add_time(time);
  return line.take();
}

std::string log_line_of(const StepRecord& record, double time) {
  Line line("step");
  line.add("step", record.step);
  line.add("total_steps", record.total_steps);
  line.add_exact("loss", record.loss);
  line.add_measured("loss_z", record.loss_z);
  line.add_exact("lr", record.learning_rate);
  line.add_exact("grad_norm", record.gradient_norm);
  line.add_measured("ms", record.milliseconds);
  line.add_measured("overhead_ms", record.overhead_milliseconds);
  line.add_measured("tokens_per_s", record.tokens_per_second);
  if (record.teraflops > 0) line.add_measured("tflops", record.teraflops);
  if (record.mfu > 0) line.add_measured("mfu", record.mfu);
  line.add("peak_bytes", record.peak_bytes);
  line.add("tokens", record.tokens);
  if (record.is_skipped) line.add_true("skipped");
  line.add_terms(record.terms);
  line.add_time(time);
  return line.take();
}

std::string log_line_of(const ValidationRecord& record, double time) {
  Line line("validation");
  line.add("step", record.step);
  line.add_exact("loss", record.loss);
  line.add("tokens", record.tokens);
  line.add_measured("ms", record.milliseconds);
  line.add_time(time);
  return line.take();
}

std::string log_line_of(const CheckpointRecord& record, double time) {
  Line line("checkpoint");
  line.add("step", record.step);
  line.add_json("path", record.path);
  line.add("bytes", record.bytes);
  line.add_measured("blocked_ms", record.blocked_milliseconds);
  line.add_measured("ms", record.milliseconds);
  line.add_time(time);
  return line.take();
}

std::string log_line_of(const EndRecord& record, double time) {
  Line line("end");
  line.add("step", record.step);
  line.add("num_steps", record.num_steps);
  line.add_measured("seconds", record.seconds);
  line.add_json("stopped_by", record.stopped_by);
  line.add_time(time);
  return line.take();
}

int64_t step_of(const LogRecord& record) {
  struct StepOf {
    int64_t operator()(const RunStart& start) const { return start.resumed_step; }
    int64_t operator()(const StepRecord& each) const { return each.step; }
    int64_t operator()(const ValidationRecord& each) const { return each.step; }
    int64_t operator()(const CheckpointRecord& each) const { return each.step; }
    int64_t operator()(const EndRecord& each) const { return each.step; }
  };
  return std::visit(StepOf{}, record);
}

std::optional<LogRecord> parse_log_line(std::string_view line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  const std::string kind = text_of(json, "kind");
  const int64_t step = integer_of(json, "step");
  if (kind == "run") return run_start_of(json);
  if (kind == "step") return step_record_of(json);
  if (kind == "validation")
    return ValidationRecord{.step = step,
                            .loss = number_of(json, "loss"),
                            .tokens = integer_of(json, "tokens"),
                            .milliseconds = number_of(json, "ms")};
  if (kind == "checkpoint")
    return CheckpointRecord{.step = step,
                            .path = text_of(json, "path"),
                            .bytes = integer_of(json, "bytes"),
                            .blocked_milliseconds = number_of(json, "blocked_ms"),
                            .milliseconds = number_of(json, "ms")};
  if (kind == "end")
    return EndRecord{.step = step,
                     .num_steps = integer_of(json, "num_steps"),
                     .seconds = number_of(json, "seconds"),
                     .stopped_by = text_of(json, "stopped_by")};
  return std::nullopt;
}

void read_log(const std::string& path, const LogRecordSink& use) {
  // For each part of the run, the last step that no later part did again.
  std::vector<int64_t> last_steps = {std::numeric_limits<int64_t>::max()};
  for_each_line(path, [&](std::string_view line, bool) {
    const std::optional<LogRecord> record = parse_log_line(line);
    const RunStart* const start = record ? std::get_if<RunStart>(&*record) : nullptr;
    if (start == nullptr) return;
    for (int64_t& last : last_steps) last = std::min(last, start->resumed_step);
    last_steps.push_back(std::numeric_limits<int64_t>::max());
  });
  size_t part = 0;
  for_each_line(path, [&](std::string_view line, bool) {
    const std::optional<LogRecord> record = parse_log_line(line);
    if (!record) return;
    if (std::holds_alternative<RunStart>(*record)) ++part;
    // A log that grows may have a new part meanwhile, of which nothing was done again.
    if (part >= last_steps.size() || step_of(*record) <= last_steps[part]) use(*record);
  });
}

JsonLog::JsonLog(const std::string& path, int64_t resumed_step, const LogRecordSink& restored)
    : file_(prepared(path, resumed_step, restored), "--log") {}

void JsonLog::write(std::string line) {
  line += '\n';
  file_.append(line);
}

}  // namespace fsdp::train
