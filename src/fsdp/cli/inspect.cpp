// `fsdp inspect`: lists a checkpoint's content, verifies it, and compares two of them.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/glob.h"
#include "fsdp/base/utf8.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/inspect_report.h"
#include "fsdp/cli/progress.h"

namespace fsdp::cli {

namespace {

// Differences shown per kind; a table of thousands helps nobody.
constexpr size_t kMostDifferences = 20;

struct InspectArguments {
  std::string path;
  std::string tensors;
  std::string diff;
  bool verify = false;
  bool stats = false;
  bool json = false;
};

using Json = nlohmann::ordered_json;

// Model and moments together, since their names differ.
TensorSet matching(const TensorCatalog& catalog, const std::string& pattern) {
  TensorSet found;
  for (const TensorSet* set : {&catalog.model(), &catalog.moments()})
    for (const auto& [name, tensor] : *set)
      if (pattern.empty() || matches_glob(pattern, name)) found.emplace(name, tensor);
  return found;
}

void refuse_unmatched(const TensorCatalog& catalog, const std::string& pattern) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : matching(catalog, "")) names.push_back(name);
  const std::string near = nearest_to_glob(pattern, names);
  throw Error(
      concat("--tensors is '", pattern, "', which no tensor of ", catalog.path(), " is called; ",
             near.empty() ? "use * for any text" : concat("is '", shown(near), "' meant?")));
}

std::vector<InspectedTensor> inspect_tensors(const TensorCatalog& catalog, const TensorSet& tensors,
                                             bool with_statistics) {
  std::vector<InspectedTensor> rows;
  for (const auto& [name, tensor] : tensors) rows.push_back({.tensor = &tensor});
  if (!with_statistics) return rows;
  Progress progress("read");
  int64_t total = 0;
  int64_t done = 0;
  for (const InspectedTensor& row : rows) total += bytes_of(row.tensor->tensor);
  StatisticsCollector collector;
  for (InspectedTensor& row : rows)
    row.statistics = statistics_of(catalog.files(), *row.tensor, collector,
                                   [&](int64_t bytes) { progress.update(done += bytes, total); });
  return rows;
}

Verification verify(const std::string& path) {
  Progress progress("verify");
  return verify_files(path, [&](int64_t done, int64_t total) { progress.update(done, total); });
}

void refuse_damage(const std::string& path, const Verification& verification) {
  const auto num_faults = static_cast<int64_t>(verification.damaged.size());
  FSDP_CHECK(num_faults == 0, path, " is damaged in ", counted_text(num_faults, "place"),
             "; use another checkpoint");
}

void run_summary(const InspectArguments& given) {
  const std::string path = checkpoint_or_files(given.path);
  const std::vector<int64_t> steps =
      path == given.path ? std::vector<int64_t>() : RunDirectory(given.path).steps();
  std::optional<Verification> verification;
  if (given.verify) verification = verify(path);
  // A damaged checkpoint may not open; then its faults are the answer.
  if (verification && !verification->damaged.empty()) {
    if (given.json)
      print_json({{"path", path}, {"verification", to_json(*verification)}});
    else
      print_verification(std::cout, *verification);
    refuse_damage(path, *verification);
  }
  const TensorCatalog catalog(path);
  const bool wants_tensors = !given.tensors.empty() || given.stats;
  TensorSet tensors;
  if (wants_tensors) tensors = matching(catalog, given.tensors);
  if (!given.tensors.empty() && tensors.empty()) refuse_unmatched(catalog, given.tensors);
  const std::vector<InspectedTensor> rows = inspect_tensors(catalog, tensors, given.stats);
  if (given.json) {
    Json report = to_json(catalog, steps);
    if (wants_tensors) report["tensors"] = to_json(rows);
    if (verification) report["verification"] = to_json(*verification);
    return print_json(report);
  }
  print_summary(std::cout, catalog, steps);
  if (verification) print_verification(std::cout, *verification);
  if (!wants_tensors) return;
  std::cout << "\n";
  print_tensors(std::cout, rows);
}

void run_diff(const InspectArguments& given) {
  const TensorCatalog first(checkpoint_or_files(given.path));
  const TensorCatalog second(checkpoint_or_files(given.diff));
  const TensorSet a = matching(first, given.tensors);
  const TensorSet b = matching(second, given.tensors);
  if (!given.tensors.empty() && a.empty() && b.empty()) refuse_unmatched(first, given.tensors);
  std::vector<TensorDifference> differences;
  {
    Progress progress("compare");
    const int64_t total = bytes_to_compare(a, b);
    int64_t done = 0;
    differences = differences_of({a, first.files()}, {b, second.files()},
                                 [&](int64_t bytes) { progress.update(done += bytes, total); });
  }
  if (given.json)
    print_json({{"first", first.path()},
                {"second", second.path()},
                {"compared", a.size()},
                {"differences", to_json(differences)}});
  else if (differences.empty())
    std::cout << "no difference in " << counted_text(static_cast<int64_t>(a.size()), "tensor")
              << "\n";
  else
    print_differences(std::cout, differences, kMostDifferences);
  FSDP_CHECK(differences.empty(), first.path(), " and ", second.path(), " differ in ",
             counted_text(static_cast<int64_t>(differences.size()), "tensor"));
}

void run_inspect(const CLI::App& app, const InspectArguments& given) {
  if (given.path.empty())
    throw UsageError("PATH is missing; give a checkpoint, a run's directory or safetensors files");
  if (app.count("--diff") > 0 && given.diff.empty())
    throw UsageError("--diff is ''; give the checkpoint to compare with, or leave it out");
  if (!given.diff.empty() && (given.verify || given.stats))
    throw UsageError(concat("--diff is '", given.diff, "', which goes without ",
                            given.verify ? "--verify" : "--stats", "; drop one of the two"));
  try {
    given.diff.empty() ? run_summary(given) : run_diff(given);
  } catch (const UsageError& error) {
    // A fault of the files is not a wrong use of the command.
    throw Error(error.what());
  }
}

constexpr const char* kInspectFooter =
    "PATH and OTHER are checkpoints, directories of runs (then their latest checkpoints), "
    "safetensors files or\ndirectories with safetensors files. Exit code 1: damaged, different, or "
    "not readable.\n"
    "Examples:\n"
    "  fsdp inspect runs/7b                                     the latest checkpoint of a run\n"
    "  fsdp inspect runs/7b/step-00001000 --verify              read every byte, check every "
    "checksum\n"
    "  fsdp inspect Llama-3.2-1B --tensors '*.layers.0.*' --stats\n"
    "  fsdp inspect runs/a --diff runs/b --json";

}  // namespace

Command add_inspect(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "inspect", "Show what a checkpoint holds, check it, or compare two of them");
  app->footer(kInspectFooter);
  const auto given = std::make_shared<InspectArguments>();
  app->add_option("PATH", given->path, "A checkpoint, a run's directory or safetensors files");
  app->add_option("--tensors", given->tensors,
                  "List tensors whose names match: * is any text, ? one character")
      ->type_name("PATTERN");
  app->add_flag("--stats", given->stats,
                "With range, mean, standard deviation, NaN, Inf and a histogram of each tensor");
  app->add_flag("--verify", given->verify,
                "Read every byte and check all checksums; names everything that is damaged");
  app->add_option("--diff", given->diff,
                  "Compare with another one: names, shapes, types and every number")
      ->type_name("OTHER");
  app->add_flag("--json", given->json, "Print one JSON object instead of tables");
  return {app, [app, given] { run_inspect(*app, *given); }};
}

}  // namespace fsdp::cli
