#include "fsdp/cli/plan_time.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/plan/published_links.h"
#include "fsdp/train/peak_rates.h"
#include "fsdp/train/report/page_frame.h"
#include "fsdp/train/report/timeline_chart.h"

namespace fsdp::cli {

namespace {

constexpr std::array kTimeOptions = {"--link",         "--outer-link", "--group-link",
                                     "--link-latency", "--picture",    "--timeline"};

std::string ms_text(double us) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(us < 99950 ? 2 : 1) << us / 1e3 << " ms";
  return text.str();
}

struct RowTimes {
  const char* name;
  const char* key;  // in JSON
  double SimulatedStep::*busy;
  double SimulatedStep::*exposed;
};

constexpr std::array<RowTimes, 4> kMoved = {
    {{"exchanges", "exchange", &SimulatedStep::exchange, &SimulatedStep::exchange},
     {"gathers", "gather", &SimulatedStep::gather, &SimulatedStep::exposed_gather},
     {"reductions", "reduce", &SimulatedStep::reduce, &SimulatedStep::exposed_reduce},
     {"update", "update", &SimulatedStep::update, &SimulatedStep::exposed_update}}};

std::string rate_words(const TimeForecast& time, const RateTable& rates) {
  std::ostringstream words;
  words << grouped_text(std::llround(time.tokens_per_s)) << " tokens/s; " << std::fixed
        << std::setprecision(time.tflops_per_rank < 10 ? 3 : 1) << time.tflops_per_rank
        << " TFLOP/s of each rank";
  const std::optional<double> peak =
      train::known_peak_tflops(rates.machine, train::ProductType::kBFloat16);
  if (peak)
    words << ", " << std::setprecision(1) << 100 * time.tflops_per_rank / *peak
          << " % of its peak in bf16";
  return words.str();
}

}  // namespace

void add_time_options(CLI::App& app, TimeArguments& given) {
  const auto option = [&](const char* name, std::string& value, const char* type,
                          const std::string& text) {
    app.add_option(name, value, text)->type_name(type);
  };
  option("--rates", given.rates, "NAME|FILE",
         concat("Forecast the time of a step, too, by a table of measured rates: ",
                join(shipped_rate_names(), ", "), ", or what --calibrate wrote"));
  option(
      "--link", given.link, "BYTES",
      concat(
          "Per second that a rank receives over the inner axis, e.g. 300GB, or a published link: ",
          published_link_names(), "; without it, as measured, else as published"));
  option("--outer-link", given.outer_link, "BYTES",
         "The same over the outer axis; without it, as the inner one");
  option("--group-link", given.group_link, "BYTES",
         "The same between the ranks of a tp or ep group; without it, as their axis");
  option("--link-latency", given.link_latency, "US",
         "Microseconds that a collective over these links takes at least; default 0");
  option("--picture", given.picture, "FILE", "Draw the step's timeline on a page of HTML");
  app.add_flag("--timeline", given.timeline, "List what runs when in the step");
}

std::optional<RateTable> rates_of(const CLI::App& app, const TimeArguments& given) {
  if (!given.rates.empty()) return load_rates(given.rates);
  for (const char* option : kTimeOptions)
    if (app.count(option) > 0)
      throw UsageError(concat(option,
                              " is given, which matters for the time of a step; give "
                              "--rates, too: ",
                              join(shipped_rate_names(), ", "),
                              ", or a file that fsdp plan --calibrate wrote"));
  return std::nullopt;
}

TimeOptions time_options(const TimeArguments& given, int64_t microbatches, bool is_recorded) {
  constexpr double kLongest = 1e9;
  const double latency = given.link_latency.empty()
                             ? 0.0
                             : parse_number("--link-latency", given.link_latency, 0.0, kLongest);
  TimeOptions options{
      .microbatches = microbatches, .is_recorded = is_recorded, .latency_us = latency};
  const auto link = [&](const char* option, const std::string& text) -> std::optional<LinkSpeed> {
    if (text.empty()) return std::nullopt;
    if (const PublishedLink* published = find_published_link(text))
      return LinkSpeed{published->bytes_per_s, latency};
    const int64_t bytes = parse_bytes(option, text);
    if (bytes == 0) refuse_option(option, text, "it needs bytes per second above 0, e.g. 300GB");
    return LinkSpeed{static_cast<double>(bytes), latency};
  };
  options.inner_link = link("--link", given.link);
  options.outer_link = link("--outer-link", given.outer_link);
  options.group_link = link("--group-link", given.group_link);
  return options;
}

void print_time(std::ostream& out, const TimeForecast& time, const RateTable& rates) {
  const SimulatedStep& step = time.step;
  out << "\ntime of a step, by the rates of " << rates.machine << " (" << rates.date
      << ", libtorch " << rates.torch << ")\n";
  std::vector<std::string> published;
  for (const UsedLink& link : time.published_links)
    published.push_back(concat(link.axis, " ", link.name, " (", link.bytes_per_s / 1e9, " GB/s)"));
  if (!published.empty())
    out << "links as published, not measured: " << join(published, ", ")
        << "; --link, --outer-link and --group-link give yours\n";
  const auto row = [&](const char* name, double us, const std::string& note) {
    out << "  " << std::left << std::setw(18) << name << std::right << std::setw(12) << ms_text(us)
        << (note.empty() ? "" : "   ") << note << "\n";
  };
  row("computing", step.compute, "");
  for (const RowTimes& each : kMoved) {
    const double exposed = step.*each.exposed;
    if (each.busy == &SimulatedStep::exchange && exposed == 0.0) continue;  // few models have any
    row(each.name, step.*each.busy,
        step.*each.busy == 0.0 ? "" : concat(ms_text(exposed), " of it with nothing beside it"));
  }
  if (time.matrices_us > 0.0)
    row("  Muon's matrices", time.matrices_us, "of it, those of the busiest owner");
  row("waiting for host", step.exposed_host, "");
  row("step", step.us, rate_words(time, rates));
}

void print_timeline(std::ostream& out, const SimulatedStep& step) {
  std::vector<StepSpan> spans = step.spans;
  std::stable_sort(spans.begin(), spans.end(),
                   [](const StepSpan& a, const StepSpan& b) { return a.begin < b.begin; });
  out << "\ntimeline of a step, ms\n"
      << std::setw(12) << "begin" << std::setw(12) << "end"
      << "  row      unit\n";
  out << std::fixed << std::setprecision(3);
  for (const StepSpan& span : spans)
    out << std::setw(12) << span.begin / 1e3 << std::setw(12) << span.end / 1e3 << "  " << std::left
        << std::setw(9) << name_of(span.row) << std::right << span.label << "\n";
}

nlohmann::ordered_json to_json(const TimeForecast& time, const RateTable& rates) {
  const SimulatedStep& step = time.step;
  nlohmann::ordered_json json = {{"rates", rates.machine},
                                 {"step_ms", step.us / 1e3},
                                 {"tokens_per_s", time.tokens_per_s},
                                 {"tflops_per_rank", time.tflops_per_rank},
                                 {"compute_ms", step.compute / 1e3}};
  nlohmann::ordered_json exposed;
  for (const RowTimes& row : kMoved) {
    json[concat(row.key, "_ms")] = step.*row.busy / 1e3;
    exposed[row.key] = step.*row.exposed / 1e3;
  }
  if (time.matrices_us > 0.0) json["muon_ms"] = time.matrices_us / 1e3;
  for (const UsedLink& link : time.published_links) json["published_links"][link.axis] = link.name;
  exposed["host"] = step.exposed_host / 1e3;
  json["exposed_ms"] = exposed;
  return json;
}

std::string picture_page(const std::string& title, const TimeForecast& time) {
  using Seconds = std::chrono::duration<double>;
  std::vector<train::TimelineSpan> spans;
  for (const StepSpan& span : time.step.spans)
    spans.push_back({name_of(span.row), span.begin, span.end, span.label});
  return train::page_html(
      {.title = title,
       .body = concat("<div class=\"grid\">\n", train::timeline_chart_html(spans), "</div>"),
       .time = Seconds(std::chrono::system_clock::now().time_since_epoch()).count()});
}

}  // namespace fsdp::cli
