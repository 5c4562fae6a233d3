#include "fsdp/cli/plan_time.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <ostream>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/cli/plan_report.h"
#include "fsdp/train/machine.h"
#include "fsdp/train/report/report_page.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kTimeOptions = {"--link",         "--outer-link", "--group-link",
                                     "--link-latency", "--picture",    "--timeline"};

std::string ms_text(double us) { return concat(fixed_text(us / 1e3, us < 99950 ? 2 : 1), " ms"); }

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

std::string tokens_words(double tokens_per_s, int64_t ranks) {
  std::string words = concat(grouped_text(std::llround(tokens_per_s)), " tokens/s");
  if (ranks > 1)
    words += concat(", ", grouped_text(std::llround(tokens_per_s / static_cast<double>(ranks))),
                    " of each rank");
  return words;
}

std::string tflops_words(double tflops, const Rates& rates) {
  std::string words = concat(fixed_text(tflops, tflops < 10 ? 3 : 1), " TFLOP/s");
  if (const std::optional<double> peak =
          train::known_peak_tflops(rates.machine, train::ProductType::kBFloat16))
    words += concat(", ", fixed_text(100 * tflops / *peak, 1), " % of the peak in bf16");
  return words;
}

// The rate of the first type of products that the machine has some of: bf16 before fp32.
std::string roof_words(const Rates& rates) {
  return tflops_words(rates.flops_per_s.begin()->second / 1e12, rates);
}

struct RunLength {
  int64_t steps;
  double days;
  double rank_hours;
};

RunLength length_of(const Training& training, const TimeForecast& time) {
  const int64_t steps = ceil_div(training.tokens, training.tokens_per_step);
  const double hours = static_cast<double>(steps) * time.step.us * 1e-6 / 3600;
  return {steps, hours / 24, hours * static_cast<double>(training.ranks)};
}

struct SourceWords {
  const char* name;  // in JSON
  std::string words;
};

SourceWords source_of(const TimeForecast& time, const Rates& rates) {
  switch (time.source) {
    case CostSource::kMeasured:
      return {"measured", "units as measured"};
    case CostSource::kScaled:
      return {"scaled", concat("units by a roofline, through those that were measured with ",
                               time.measured.rows, " x ", time.measured.sequence, " tokens")};
    case CostSource::kRoofline:
      return {"roofline",
              concat("units by a roofline, products at ", roof_words(rates), " and passes at ",
                     fixed_text(rates.bytes_per_s / 1e12, 2),
                     " TB/s: this model was not measured; fsdp plan --calibrate does that")};
  }
  FSDP_ASSERT(false, "no such source");
}

}  // namespace

void add_time_options(CLI::App& app, TimeArguments& given) {
  const auto option = [&](const char* name, std::string& value, const char* type,
                          const std::string& text) {
    app.add_option(name, value, text)->type_name(type)->group("time");
  };
  option("--rates", given.rates, "NAME|FILE",
         concat("Forecast the time of a step, too, by the rates of a machine: ",
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
  app.add_flag("--timeline", given.timeline, "List what runs when in the step")->group("time");
}

std::optional<Rates> rates_of(const CLI::App& app, const TimeArguments& given) {
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

TimeOptions time_options(const TimeArguments& given, int64_t microbatches, bool is_recorded,
                         const Rates& rates) {
  constexpr double kLongest = 1e9;
  const double latency = given.link_latency.empty()
                             ? 0.0
                             : parse_number("--link-latency", given.link_latency, 0.0, kLongest);
  TimeOptions options{
      .microbatches = microbatches, .is_recorded = is_recorded, .latency_us = latency};
  const auto link = [&](const char* axis, const char* option,
                        const std::string& text) -> std::optional<LinkSpeed> {
    if (text.empty()) return std::nullopt;
    if (const PublishedLink* published = find_published_link(text, rates.machine)) {
      options.published_links.push_back({axis, *published});
      return LinkSpeed{published->bytes_per_s, latency};
    }
    if (text == "nvlink")
      throw UsageError(concat(option, " is 'nvlink', but the rates of ", rates.machine,
                              " do not say which; give bytes per second, or ",
                              published_link_names()));
    if (std::isdigit(static_cast<unsigned char>(text.front())) == 0)
      refuse_option(option, text,
                    concat("it must be bytes per second, e.g. 300GB, or ", published_link_names()));
    const int64_t bytes = parse_bytes(option, text);
    if (bytes == 0) refuse_option(option, text, "it needs bytes per second above 0, e.g. 300GB");
    return LinkSpeed{static_cast<double>(bytes), latency};
  };
  options.inner_link = link("inner", "--link", given.link);
  options.outer_link = link("outer", "--outer-link", given.outer_link);
  options.group_link = link("group", "--group-link", given.group_link);
  return options;
}

void print_time(std::ostream& out, const TimeForecast& time, const Rates& rates,
                const Training& training) {
  const SimulatedStep& step = time.step;
  out << "\ntime of a step, by the rates of " << rates.machine << " (" << rates.date
      << (rates.torch.empty() ? "" : ", libtorch ") << rates.torch << ")\n"
      << source_of(time, rates).words << "\n";
  if (!rates.note.empty()) out << rates.note << "\n";
  std::vector<std::string> published;
  for (const UsedLink& link : time.published_links)
    published.push_back(
        concat(link.axis, " ", link.link.name, " (", link.link.bytes_per_s / 1e9, " GB/s)"));
  if (!published.empty())
    out << "links by data sheet, not measured: " << join(published, ", ")
        << "; --link, --outer-link and --group-link give yours\n";
  const auto row = [&](const char* name, double us, const std::string& note) {
    out << "  " << std::left << std::setw(18) << name << std::right << std::setw(12) << ms_text(us)
        << (note.empty() ? "" : "   ") << note << "\n";
  };
  const std::string reached = tflops_words(time.tflops_per_rank * step.us / step.compute, rates);
  row("computing", step.compute, reached);
  for (const RowTimes& each : kMoved) {
    const double exposed = step.*each.exposed;
    if (each.busy == &SimulatedStep::exchange && exposed == 0.0) continue;  // few models have any
    row(each.name, step.*each.busy,
        step.*each.busy == 0.0 ? "" : concat(ms_text(exposed), " of it with nothing beside it"));
  }
  if (time.matrices_us > 0.0)
    row("  Muon's matrices", time.matrices_us, "of it, those of the busiest owner");
  row("waiting for host", step.exposed_host, "");
  row("step", step.us,
      concat(tokens_words(time.tokens_per_s, training.ranks), "; ",
             tflops_words(time.tflops_per_rank, rates)));
  if (time.slow_us > 0)
    row("  with contention", time.slow_us,
        concat(tokens_words(time.tokens_per_s * step.us / time.slow_us, training.ranks),
               ", if kernels take ", number_text(kSlowBeside),
               " times as long beside collectives"));
  if (training.tokens == 0) return;
  const RunLength run = length_of(training, time);
  out << "\n"
      << grouped_text(training.tokens) << " tokens: " << grouped_text(run.steps) << " steps, "
      << fixed_text(run.days, 1) << " days, " << grouped_text(std::llround(run.rank_hours))
      << " hours of GPUs";
  if (time.slow_us > 0)
    out << "; with contention " << fixed_text(run.days * time.slow_us / step.us, 1) << " days";
  out << "\n";
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

Json to_json(const TimeForecast& time, const Rates& rates, const Training& training) {
  const SimulatedStep& step = time.step;
  Json json = {{"rates", rates.machine},
               {"source", source_of(time, rates).name},
               {"step_ms", step.us / 1e3},
               {"tokens_per_s", time.tokens_per_s},
               {"tflops_per_rank", time.tflops_per_rank},
               {"compute_ms", step.compute / 1e3}};
  Json exposed;
  for (const RowTimes& row : kMoved) {
    json[concat(row.key, "_ms")] = step.*row.busy / 1e3;
    exposed[row.key] = step.*row.exposed / 1e3;
  }
  if (time.matrices_us > 0.0) json["muon_ms"] = time.matrices_us / 1e3;
  for (const UsedLink& link : time.published_links)
    json["published_links"][link.axis] = link.link.name;
  if (time.slow_us > 0) json["contended_step_ms"] = time.slow_us / 1e3;
  if (training.tokens > 0) {
    const RunLength run = length_of(training, time);
    json["training"] = {{"tokens", training.tokens},
                        {"steps", run.steps},
                        {"days", run.days},
                        {"rank_hours", run.rank_hours}};
  }
  exposed["host"] = step.exposed_host / 1e3;
  json["exposed_ms"] = exposed;
  return json;
}

std::string picture_page(const std::string& title, const TimeForecast& time) {
  std::vector<train::TimelineSpan> spans;
  for (const StepSpan& span : time.step.spans)
    spans.push_back({name_of(span.row), span.begin, span.end, span.label});
  return train::timeline_page(title, spans);
}

}  // namespace fsdp::cli
