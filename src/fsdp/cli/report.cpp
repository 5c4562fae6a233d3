// `fsdp report`: the curves and figures of runs as one page, from their logs.
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/cli/command.h"
#include "fsdp/train/log/run_history.h"
#include "fsdp/train/report/report_page.h"

namespace fsdp::cli {

namespace {

struct ReportArguments {
  std::vector<std::string> runs;
  // Not report.html, which is the name of a run's own: that has more, such as a timeline.
  std::string output = "runs.html";
};

void run_report(const ReportArguments& given) {
  if (given.runs.empty())
    throw UsageError(
        "no run was given; name directories of runs or their logs, e.g. fsdp report "
        "runs/a runs/b");
  if (given.runs.size() > train::kMaxComparedRuns)
    throw UsageError(concat(given.runs.size(), " runs were given, and a page tells ",
                            train::kMaxComparedRuns, " apart; give fewer"));
  if (given.output.empty())
    throw UsageError("--output is empty; name an HTML file, e.g. --output runs.html");
  std::vector<train::LoggedRun> runs;
  for (const std::string& path : given.runs) runs.push_back(train::read_logged_run(path));
  train::ReportFile(given.output, "--output").write([&] { return train::comparison_page(runs); });
  std::cout << "report of " << counted_text(static_cast<int64_t>(runs.size()), "run") << ": "
            << given.output << "\n";
}

}  // namespace

Command add_report(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("report", "Show one run or several on one page");
  app->footer(
      "Examples:\n"
      "  fsdp report runs/a                             a run, from its log\n"
      "  fsdp report runs/a runs/b --output both.html   curves, figures and settings that differ");
  const auto given = std::make_shared<ReportArguments>();
  app->add_option("runs", given->runs, "Directories of runs, or their logs")->type_name("RUN...");
  app->add_option("--output", given->output, "The page: one HTML file that needs nothing else")
      ->type_name("FILE")
      ->capture_default_str();
  return {app, [given] { run_report(*given); }};
}

}  // namespace fsdp::cli
