#include "fsdp/train/report/report_page.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/base/version.h"
#include "fsdp/train/log/json_log.h"
#include "fsdp/train/report/page.h"

namespace fsdp::train {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kLeastPause = 5;        // in s
constexpr double kPausePerWriting = 99;  // 1 % of the time

double steady_seconds() {
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// --- series --------------------------------------------------------------------------------------

// About one point per pixel of a chart on a usual screen.
constexpr size_t kMaxPoints = 600;
// Fewer points say more by themselves.
constexpr size_t kLeastSmoothed = 40;

// More than a chart can show.
double rounded(double value) { return in_digits(value, 5); }

// Steps, means, and where a point stands for several steps, their lowest and highest values.
Json series_json(const Series& series, size_t max_points, bool is_smoothed = false) {
  const std::vector<SeriesBucket> buckets = series.coarse(max_points);
  Json json = {{"x", Json::array()}, {"y", Json::array()}};
  const bool has_ranges =
      std::ranges::any_of(buckets, [](const SeriesBucket& each) { return each.count > 1; });
  for (const SeriesBucket& bucket : buckets) {
    json["x"].push_back(bucket.middle_step());
    json["y"].push_back(rounded(bucket.is_empty() ? NAN : bucket.mean()));
    if (!has_ranges) continue;
    json["low"].push_back(rounded(bucket.is_empty() ? NAN : bucket.min));
    json["high"].push_back(rounded(bucket.is_empty() ? NAN : bucket.max));
  }
  if (is_smoothed && buckets.size() >= kLeastSmoothed)
    for (const double value : smoothed_means(buckets)) json["smooth"].push_back(rounded(value));
  return json;
}

// Pairs of a step and the tokens trained on by then, at the ends of lines that have all steps
// between them: two where every step has as many tokens as the others.
Json token_marks(const Series& tokens) {
  std::vector<std::pair<double, double>> marks;
  for (const SeriesBucket& bucket : tokens.coarse(kMaxPoints)) {
    if (bucket.is_empty() || !(bucket.mean() > 0)) continue;
    const std::pair<double, double> next(bucket.middle_step(), bucket.mean());
    if (marks.size() >= 2) {
      const auto& [step_a, tokens_a] = marks[marks.size() - 2];
      const auto& [step_b, tokens_b] = marks.back();
      const double slope = (tokens_b - tokens_a) / (step_b - step_a);
      const double expected = tokens_a + (next.first - step_a) * slope;
      if (std::abs(expected - next.second) <= 1e-6 * next.second) marks.pop_back();
    }
    marks.push_back(next);
  }
  return marks;
}

// --- a run ---------------------------------------------------------------------------------------

// The rows of a list, each as an object that `row_of` makes.
Json list_json(const auto& rows, const auto& row_of) {
  Json json = Json::array();
  for (const auto& row : rows) json.push_back(row_of(row));
  return json;
}

Json memory_json(std::span<const MemoryRow> rows) {
  const auto known = [](int64_t bytes) { return bytes == kUnknownBytes ? Json() : Json(bytes); };
  return list_json(rows, [&](const MemoryRow& row) -> Json {
    return {{"kind", row.kind},
            {"forecast", known(row.forecast_bytes)},
            {"measured", known(row.measured_bytes)},
            {"is_on_host", row.is_on_host}};
  });
}

Json settings_json(std::span<const SettingRow> rows) {
  return list_json(rows, [](const SettingRow& row) -> Json {
    return {{"group", row.group},
            {"name", row.name},
            {"value", row.value},
            {"is_changed", row.is_changed},
            {"help", row.help}};
  });
}

Json checkpoints_json(const std::deque<CheckpointRecord>& records) {
  return list_json(records, [](const CheckpointRecord& record) -> Json {
    return {{"step", record.step},
            {"path", record.path},
            {"bytes", record.bytes},
            {"ms", record.milliseconds},
            {"blocked_ms", record.blocked_milliseconds}};
  });
}

// `max_points` are those of each curve.
Json run_json(const std::string& name, const RunFacts& facts, const RunHistory& history,
              size_t max_points) {
  const StepRecord last = history.last_step.value_or(StepRecord{});
  const SeriesBucket recent = history.loss.recent();
  Json terms = Json::object();
  for (const NamedValue& term : last.terms) terms[term.name] = term.value;
  Json json = {
      {"name", name},
      {"step", last.step},
      {"total_steps", last.total_steps},
      {"num_tokens", last.tokens},
      {"peak_bytes", last.peak_bytes},
      {"mfu", last.mfu},
      {"terms", terms},
      {"step_seconds", history.step_seconds},
      {"recent",
       {{"first", recent.first_step},
        {"last", recent.last_step},
        {"mean", recent.is_empty() ? NAN : recent.mean()}}},
      {"tokens_per_second", history.tokens_per_second.median(Series::Middle::kLower)},
      {"milliseconds", history.milliseconds.median()},
      {"series",
       {{"loss", series_json(history.loss, max_points, /*is_smoothed=*/true)},
        {"validation_loss", series_json(history.validation_loss, max_points / 4)},
        {"learning_rate", series_json(history.learning_rate, max_points)},
        {"gradient_norm", series_json(history.gradient_norm, max_points)},
        {"tokens_per_second", series_json(history.tokens_per_second, max_points)},
        {"milliseconds", series_json(history.milliseconds, max_points)}}},
      {"tokens", token_marks(history.tokens)},
      {"resumed", history.resumed_steps},
      {"num_skipped", history.num_skipped},
      {"checkpoints", checkpoints_json(history.checkpoints)},
      {"num_checkpoints", history.num_checkpoints},
      {"outliers",
       list_json(history.outliers,
                 [](const StepRecord& record) -> Json {
                   return {{"step", record.step}, {"loss", record.loss}, {"z", record.loss_z}};
                 })},
      {"num_outliers", history.num_outliers},
      {"memory", memory_json(facts.memory)},
      {"settings", settings_json(facts.settings)},
      {"environment", list_json(facts.environment,
                                [](const EnvironmentRow& row) -> Json {
                                  return {{"name", row.name}, {"value", row.value}};
                                })},
  };
  if (const auto& best = history.best_validation)
    json["best"] = {{"step", best->step}, {"loss", best->loss}};
  if (const auto& end = history.end)
    json["end"] = {{"stopped_by", end->stopped_by}, {"seconds", end->seconds}};
  return json;
}

// --- a step --------------------------------------------------------------------------------------

// Joins the spans of one row: those that overlap or hide others, and those about a pixel wide or
// apart, so that a row has some hundred bars at most. Times are in ms from `begin_us` on.
Json row_json(std::vector<TimelineSpan> spans, double begin_us, double near_us) {
  std::ranges::sort(spans, [](const TimelineSpan& a, const TimelineSpan& b) {
    return a.begin_us != b.begin_us ? a.begin_us < b.begin_us : a.end_us > b.end_us;
  });
  std::vector<std::pair<TimelineSpan, int64_t>> bars;  // with how many others are in it
  double busy_us = 0;
  double busy_until = begin_us;
  for (const TimelineSpan& span : spans) {
    busy_us += std::max(0.0, span.end_us - std::max(busy_until, span.begin_us));
    if (!bars.empty() && span.end_us <= busy_until) continue;
    busy_until = span.end_us;
    if (!bars.empty()) {
      auto& [last, num_joined] = bars.back();
      const bool is_near = span.begin_us - last.end_us < near_us;
      const bool is_short =
          std::min(span.end_us - span.begin_us, last.end_us - last.begin_us) < 2 * near_us;
      if ((is_near && is_short) || span.begin_us < last.end_us) {
        last.end_us = span.end_us;
        ++num_joined;
        continue;
      }
    }
    bars.emplace_back(span, 0);
  }
  Json json = {{"name", spans.front().row}, {"busy_ms", busy_us / 1e3}, {"bars", Json::array()}};
  for (const auto& [bar, num_joined] : bars)
    json["bars"].push_back(
        {rounded((bar.begin_us - begin_us) / 1e3), rounded((bar.end_us - begin_us) / 1e3),
         num_joined == 0 ? bar.label : concat(bar.label, " and ", num_joined, " more")});
  return json;
}

// Rows in the order compute, gather, reduce, update, others; null without spans.
Json timeline_json(std::span<const TimelineSpan> spans) {
  double begin = INFINITY;
  double end = -INFINITY;
  std::vector<std::string> names = {"compute", "gather", "reduce", "update"};
  for (const TimelineSpan& span : spans) {
    begin = std::min(begin, span.begin_us);
    end = std::max(end, span.end_us);
    if (std::ranges::find(names, span.row) == names.end()) names.push_back(span.row);
  }
  if (!(end > begin)) return nullptr;
  constexpr double kPixels = 1000;
  Json json = {{"ms", (end - begin) / 1e3}, {"rows", Json::array()}};
  for (const std::string& name : names) {
    std::vector<TimelineSpan> of_row;
    std::ranges::copy_if(spans, std::back_inserter(of_row),
                         [&](const TimelineSpan& span) { return span.row == name; });
    if (!of_row.empty())
      json["rows"].push_back(row_json(std::move(of_row), begin, (end - begin) / kPixels));
  }
  return json;
}

// --- the page ------------------------------------------------------------------------------------

Json page_json(const std::string& title) {
  using Seconds = std::chrono::duration<double>;
  return {
      {"title", title},
      {"version", FSDP_VERSION},
      {"time", std::floor(Seconds(std::chrono::system_clock::now().time_since_epoch()).count())},
      {"is_live", false},
      {"runs", Json::array()}};
}

std::string page_of(const Json& json) {
  // Texts from outside (paths, a model's output) need not be UTF-8.
  std::string figures = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  // A "</script>" in a text would end the data, and "<!--" hide the end.
  for (size_t at = figures.find('<'); at != std::string::npos; at = figures.find('<', at))
    figures.replace(at, 1, "\\u003c");
  constexpr std::string_view kPlace = "REPORT_DATA";
  std::string page = kReportPage;
  return page.replace(page.find(kPlace), kPlace.size(), figures);
}

}  // namespace

void check_replaceable(const std::string& path, const std::string& what,
                       const std::string& option) {
  struct stat status {};
  FSDP_CHECK(::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode), path,
             ": is not a file, so no ", what, " can replace it; choose another place with ",
             option);
}

ReportFile::ReportFile(std::string path, const std::string& option, std::function<double()> now)
    : path_(std::move(path)), now_(now ? std::move(now) : steady_seconds) {
  make_directories(directory_of(path_));
  check_replaceable(path_, "report", option);
}

bool ReportFile::is_due() const { return now_() >= next_at_; }

void ReportFile::write(const std::function<std::string()>& page) {
  const double begin = now_();
  try {
    write_file_durably(path_, page());
    was_written_ = true;
    is_failing_ = false;
  } catch (const Error& error) {
    if (!was_written_) throw;
    if (!std::exchange(is_failing_, true))
      log(LogLevel::kWarning, "the report cannot be written: ", error.what(),
          "; training goes on without it");
  }
  const double end = now_();
  next_at_ = end + std::max(kLeastPause, kPausePerWriting * (end - begin));
}

std::string report_page(const ReportContent& content) {
  Json json = page_json(content.facts.title.empty() ? "Training run" : content.facts.title);
  json["is_live"] = content.is_live && !content.history.end;
  json["runs"].push_back(run_json("", content.facts, content.history, kMaxPoints));
  json["timeline"] = timeline_json(content.timeline);
  if (const TextSample* sample = content.sample)
    json["sample"] = {
        {"step", sample->step}, {"prompt", sample->prompt}, {"continuation", sample->continuation}};
  return page_of(json);
}

std::string comparison_page(std::span<const LoggedRun> runs) {
  if (runs.size() == 1)
    return report_page({.facts = runs.front().facts,
                        .history = runs.front().history,
                        .timeline = {},
                        .is_live = false});
  Json json = page_json(counted_text(static_cast<int64_t>(runs.size()), "run"));
  // Half as many points for each, so that a page of many runs stays small.
  for (const LoggedRun& run : runs)
    json["runs"].push_back(run_json(run.name, run.facts, run.history, kMaxPoints / 2));
  return page_of(json);
}

std::string timeline_page(const std::string& title, std::span<const TimelineSpan> spans) {
  Json json = page_json(title);
  json["timeline"] = timeline_json(spans);
  return page_of(json);
}

}  // namespace fsdp::train
