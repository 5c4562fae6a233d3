// `fsdp inspect`: lists a checkpoint's content, verifies it, and compares two of them.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/tools/tensor_numbers.h"
#include "fsdp/checkpoint/tools/verify_files.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/progress.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

// A tensor that was asked for.
struct InspectedTensor {
  const CatalogTensor* tensor = nullptr;
  std::optional<TensorStatistics> statistics = std::nullopt;
};

// --- tables and JSON -----------------------------------------------------------------------------

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

struct Amount {
  int64_t numel = 0;
  int64_t bytes = 0;
  std::map<DType, int64_t> bytes_of_types;
};

Amount amount_of(const TensorSet& tensors) {
  Amount amount;
  for (const auto& [name, tensor] : tensors) {
    amount.numel += numel_of(tensor.tensor);
    amount.bytes += bytes_of(tensor.tensor);
    amount.bytes_of_types[tensor.tensor.dtype] += bytes_of(tensor.tensor);
  }
  return amount;
}

std::string types_text(const Amount& amount) {
  std::vector<std::string> names;
  for (const auto& [dtype, bytes] : amount.bytes_of_types) names.emplace_back(name_of(dtype));
  return join(names, " and ");
}

int64_t file_bytes(const TensorCatalog& catalog) {
  int64_t bytes = 0;
  for (const CheckedFile& file : catalog.files()) bytes += file.bytes;
  return bytes;
}

// JSON has no NaN and no Inf.
Json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json row_of(const StoredTensor& tensor) {
  return {{"name", tensor.name}, {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}};
}

Json row_of(const TensorStatistics& statistics) {
  return {{"min", statistics.min},       {"max", statistics.max},     {"mean", statistics.mean},
          {"std", statistics.deviation}, {"nan", statistics.num_nan}, {"inf", statistics.num_inf},
          {"histogram", statistics.bins}};
}

Json row_of(const TensorDifference& difference) {
  Json row = {{"name", difference.name}};
  row["first"] = difference.first ? row_of(*difference.first) : Json();
  row["second"] = difference.second ? row_of(*difference.second) : Json();
  if (difference.is_only_in_one() || difference.has_other_shape()) return row;
  row["num_different"] = difference.num_different;
  row["max_difference"] = number(difference.max_difference);
  return row;
}

void print_row(std::ostream& out, const char* name, const std::string& value) {
  constexpr size_t kMost = 4096;  // the longest path
  if (!value.empty()) out << std::left << std::setw(12) << name << shown(value, kMost) << "\n";
}

std::string steps_text(std::span<const int64_t> steps) {
  constexpr size_t kMost = 20;
  std::vector<std::string> words;
  for (const int64_t step : steps.last(std::min(steps.size(), kMost)))
    words.push_back(std::to_string(step));
  return concat(join(words, ", "),
                steps.size() > kMost ? concat(" and ", steps.size() - kMost, " before") : "");
}

std::string mesh_text(const Manifest& manifest) {
  std::string text = std::to_string(manifest.num_ranks());
  if (manifest.mesh.outer > 1)
    text += concat(" = ", manifest.mesh.outer, " outer x ", manifest.mesh.inner, " inner");
  if (manifest.sum_group > 1 && manifest.sum_group < manifest.num_ranks())
    text += concat(", which add gradients in groups of ", manifest.sum_group, " first");
  return text;
}

std::string optimizer_text(const OptimizerRecord& optimizer) {
  if (optimizer.name.empty()) return "none: weights alone";
  std::string text = concat(optimizer.name, " after ", optimizer.step, " steps");
  if (optimizer.skipped > 0) text += concat(", ", optimizer.skipped, " skipped");
  if (optimizer.loss_scale != 1.0) text += concat(", loss scale ", optimizer.loss_scale);
  return text;
}

std::string set_text(const TensorSet& tensors, const char* noun) {
  if (tensors.empty()) return "";
  const Amount amount = amount_of(tensors);
  return concat(counted_text(static_cast<int64_t>(tensors.size()), "tensor"), ", ",
                counted_text(amount.numel, noun), ", ", bytes_text(amount.bytes), ", ",
                types_text(amount));
}

std::string statistics_text(const TensorStatistics& statistics) {
  if (statistics.numel == 0) return "no elements";
  std::string text;
  if (statistics.num_finite() > 0)
    text = concat("|", histogram_text(statistics), "|  min ", number_text(statistics.min), "  max ",
                  number_text(statistics.max), "  mean ", number_text(statistics.mean), "  std ",
                  number_text(statistics.deviation), "  ");
  return concat(text, "nan ", statistics.num_nan, "  inf ", statistics.num_inf);
}

// The kind, in the order in which kinds are printed, and what differs.
std::pair<std::string, std::string> difference_texts(const TensorDifference& difference) {
  const std::string name = shown(difference.name);
  if (!difference.second) return {"only in the first ", name};
  if (!difference.first) return {"only in the second", name};
  if (difference.has_other_shape())
    return {"other shape       ", concat(name, ": ", list_text(difference.first->shape), " and ",
                                         list_text(difference.second->shape))};
  const std::string values =
      difference.num_different == 0
          ? "the same numbers"
          : concat(grouped_text(difference.num_different), " of ",
                   grouped_text(numel_of(*difference.first)), " elements differ, by at most ",
                   number_text(difference.max_difference));
  if (difference.has_other_dtype())
    return {"other type        ", concat(name, ": ", name_of(difference.first->dtype), " and ",
                                         name_of(difference.second->dtype), ", ", values)};
  return {"other values      ", concat(name, ": ", values)};
}

Json catalog_json(const TensorCatalog& catalog, std::span<const int64_t> steps) {
  Json report = {{"path", catalog.path()},
                 {"format", catalog.manifest() ? "fsdp.cpp" : "safetensors"}};
  if (!steps.empty()) report["steps"] = std::vector<int64_t>(steps.begin(), steps.end());
  if (catalog.manifest()) {
    const Manifest& manifest = *catalog.manifest();
    report["step"] = manifest.step;
    report["ranks"] = manifest.num_ranks();
    report["mesh"] = {{"outer", manifest.mesh.outer}, {"inner", manifest.mesh.inner}};
    report["sum_group"] = manifest.sum_group;
    report["strategy"] = manifest.strategy;
    report["precision"] = manifest.precision;
    report["schedule"] = manifest.schedule;
    report["units"] = manifest.units.size();
    if (!manifest.optimizer.name.empty())
      report["optimizer"] = {{"name", manifest.optimizer.name},
                             {"moments", manifest.optimizer.moments},
                             {"step", manifest.optimizer.step},
                             {"skipped", manifest.optimizer.skipped},
                             {"loss_scale", manifest.optimizer.loss_scale}};
  }
  const auto set_json = [](const TensorSet& set) {
    const Amount amount = amount_of(set);
    return Json{{"tensors", set.size()}, {"elements", amount.numel}, {"bytes", amount.bytes}};
  };
  report["model"] = set_json(catalog.model());
  report["moments"] = set_json(moments_of(catalog, {}));
  report["has_config"] = catalog.model_config().has_value();
  Json files = Json::array();
  for (const CheckedFile& file : catalog.files())
    files.push_back({{"path", file.path}, {"bytes", file.bytes}});
  report["files"] = std::move(files);
  return report;
}

Json tensors_json(std::span<const InspectedTensor> tensors) {
  Json rows = Json::array();
  for (const InspectedTensor& each : tensors) {
    Json row = row_of(each.tensor->tensor);
    row["bytes"] = bytes_of(each.tensor->tensor);
    row["parts"] = each.tensor->boxes.size();
    if (each.statistics) row["statistics"] = row_of(*each.statistics);
    rows.push_back(std::move(row));
  }
  return rows;
}

Json verification_json(const Verification& verification) {
  Json damaged = Json::array();
  for (const DamagedPart& part : verification.damaged)
    damaged.push_back({{"path", part.path}, {"what", part.what}});
  return {{"has_checksums", verification.has_checksums},
          {"has_manifest_checksum", verification.has_manifest_checksum},
          {"files", verification.num_files},
          {"bytes", verification.bytes},
          {"damaged", std::move(damaged)}};
}

// `steps` are those of the run whose latest checkpoint this is; empty: the user named it directly.
void print_summary(std::ostream& out, const TensorCatalog& catalog,
                   std::span<const int64_t> steps) {
  print_row(out, "path", catalog.path());
  if (!steps.empty()) print_row(out, "run's steps", steps_text(steps));
  if (catalog.manifest()) {
    const Manifest& manifest = *catalog.manifest();
    print_row(out, "step", std::to_string(manifest.step));
    print_row(out, "ranks", mesh_text(manifest));
    print_row(out, "strategy", manifest.strategy);
    print_row(out, "precision", manifest.precision);
    print_row(out, "schedule", manifest.schedule);
    print_row(out, "optimizer", optimizer_text(manifest.optimizer));
    if (!manifest.units.empty()) print_row(out, "units", std::to_string(manifest.units.size()));
  } else {
    print_row(out, "format", "safetensors files of other tools, without checksums");
  }
  print_row(out, "model", set_text(catalog.model(), "parameter"));
  print_row(out, "moments", set_text(moments_of(catalog, {}), "element"));
  print_row(out, "config.json", catalog.model_config() ? "yes" : "none");
  print_row(out, "files",
            concat(catalog.files().size(), " with tensors, ", bytes_text(file_bytes(catalog))));
}

// A column is as wide as its widest cell; statistics come below their tensor.
void print_tensors(std::ostream& out, std::span<const InspectedTensor> tensors) {
  std::vector<std::array<std::string, 5>> rows = {{"name", "type", "shape", "size", "parts"}};
  for (const InspectedTensor& each : tensors) {
    const StoredTensor& tensor = each.tensor->tensor;
    rows.push_back({shown(tensor.name), std::string(name_of(tensor.dtype)), list_text(tensor.shape),
                    bytes_text(bytes_of(tensor)), std::to_string(each.tensor->boxes.size())});
  }
  std::array<size_t, 4> widths{};
  for (const auto& row : rows)
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], row[i].size() + 2);
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t i = 0; i < widths.size(); ++i)
      out << std::left << std::setw(static_cast<int>(widths[i])) << rows[r][i];
    out << rows[r].back() << "\n";
    if (r > 0 && tensors[r - 1].statistics)
      out << "  " << statistics_text(*tensors[r - 1].statistics) << "\n";
  }
}

void print_verification(std::ostream& out, const Verification& verification) {
  for (const DamagedPart& part : verification.damaged)
    out << "damaged     " << part.path << ": " << part.what << "\n";
  const std::string read =
      concat(counted_text(verification.num_files, "file"), ", ", bytes_text(verification.bytes));
  if (!verification.has_checksums)
    print_row(out, "verified",
              concat(read,
                     ": all can be read and the headers are right; there "
                     "are no checksums"));
  else if (verification.damaged.empty())
    print_row(out, "verified",
              concat(read, ": every byte is what was written",
                     verification.has_manifest_checksum
                         ? ""
                         : "; manifest.json is of an old version and has no checksum itself"));
}

// The first ones of each kind: a table of thousands helps nobody.
void print_differences(std::ostream& out, std::span<const TensorDifference> differences) {
  constexpr size_t kMost = 20;
  std::map<std::string, std::vector<std::string>> kinds;
  for (const TensorDifference& difference : differences) {
    const auto [kind, text] = difference_texts(difference);
    kinds[kind].push_back(text);
  }
  for (const auto& [kind, list] : kinds) {
    for (size_t i = 0; i < std::min(list.size(), kMost); ++i)
      out << kind << "  " << list[i] << "\n";
    if (list.size() > kMost)
      out << "... and " << list.size() - kMost << " more of this kind (--json has all)\n";
  }
}

// --- the questions -------------------------------------------------------------------------------

struct InspectArguments {
  std::string path;
  std::string tensors;
  std::string diff;
  bool verify = false;
  bool stats = false;
  bool json = false;
};

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

void run_summary(const InspectArguments& given) {
  const std::string path = checkpoint_or_files(given.path);
  const std::vector<int64_t> steps =
      path == given.path ? std::vector<int64_t>() : RunDirectory(given.path).steps();
  std::optional<Verification> verification;
  if (given.verify) {
    Progress progress("verify");
    verification =
        verify_files(path, [&](int64_t done, int64_t total) { progress.update(done, total); });
  }
  // A damaged checkpoint may not open; then its faults are the answer.
  if (verification && !verification->damaged.empty()) {
    if (given.json)
      print_json({{"path", path}, {"verification", verification_json(*verification)}});
    else
      print_verification(std::cout, *verification);
    throw Error(concat(path, " is damaged in ",
                       counted_text(static_cast<int64_t>(verification->damaged.size()), "place"),
                       "; use another checkpoint"));
  }
  const TensorCatalog catalog(path);
  const bool wants_tensors = !given.tensors.empty() || given.stats;
  TensorSet tensors;
  if (wants_tensors) tensors = matching(catalog, given.tensors);
  if (!given.tensors.empty() && tensors.empty()) refuse_unmatched(catalog, given.tensors);
  const std::vector<InspectedTensor> rows = inspect_tensors(catalog, tensors, given.stats);
  if (given.json) {
    Json report = catalog_json(catalog, steps);
    if (wants_tensors) report["tensors"] = tensors_json(rows);
    if (verification) report["verification"] = verification_json(*verification);
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
  if (given.json) {
    Json rows = Json::array();
    for (const TensorDifference& difference : differences) rows.push_back(row_of(difference));
    print_json({{"first", first.path()},
                {"second", second.path()},
                {"compared", a.size()},
                {"differences", rows}});
  } else if (differences.empty()) {
    std::cout << "no difference in " << counted_text(static_cast<int64_t>(a.size()), "tensor")
              << "\n";
  } else {
    print_differences(std::cout, differences);
  }
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
