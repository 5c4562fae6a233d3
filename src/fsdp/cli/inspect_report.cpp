#include "fsdp/cli/inspect_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>

#include "fsdp/base/text.h"
#include "fsdp/base/utf8.h"
#include "fsdp/checkpoint/amax_history.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

std::string size_words(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

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
  if (manifest.mesh.outer == 1) return std::to_string(manifest.num_ranks());
  return concat(manifest.num_ranks(), " = ", manifest.mesh.outer, " outer x ", manifest.mesh.inner,
                " inner");
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
                counted_text(amount.numel, noun), ", ", size_words(amount.bytes), ", ",
                types_text(amount));
}

// A column is as wide as its widest cell.
class Table {
 public:
  explicit Table(std::vector<std::string> head) : rows_({std::move(head)}) {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  // Calls after(i) below row i.
  void print(std::ostream& out, const std::function<void(size_t)>& after) const {
    std::vector<size_t> widths(rows_.front().size(), 0);
    for (const auto& row : rows_)
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    for (size_t r = 0; r < rows_.size(); ++r) {
      for (size_t i = 0; i < rows_[r].size(); ++i) {
        const bool is_last = i + 1 == rows_[r].size();
        out << std::left << std::setw(is_last ? 0 : static_cast<int>(widths[i]) + 2) << rows_[r][i];
      }
      out << "\n";
      if (r > 0) after(r - 1);
    }
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string statistics_text(const TensorStatistics& statistics) {
  if (statistics.numel == 0) return "no elements";
  std::string text;
  if (statistics.num_finite() > 0)
    text = concat("|", histogram_text(statistics), "|  min ", number_text(statistics.min), "  max ",
                  number_text(statistics.max), "  mean ", number_text(statistics.mean), "  std ",
                  number_text(statistics.deviation), "  ");
  return concat(text, "nan ", statistics.num_nan, "  inf ", statistics.num_inf);
}

std::string difference_text(const TensorDifference& difference) {
  const std::string name = shown(difference.name);
  if (!difference.second) return concat("only in the first   ", name);
  if (!difference.first) return concat("only in the second  ", name);
  if (difference.has_other_shape())
    return concat("other shape         ", name, ": ", list_text(difference.first->shape), " and ",
                  list_text(difference.second->shape));
  const std::string values =
      difference.num_different == 0
          ? "the same numbers"
          : concat(grouped_text(difference.num_different), " of ",
                   grouped_text(numel_of(*difference.first)), " elements differ, by at most ",
                   number_text(difference.max_difference));
  if (difference.has_other_dtype())
    return concat("other type          ", name, ": ", name_of(difference.first->dtype), " and ",
                  name_of(difference.second->dtype), ", ", values);
  return concat("other values        ", name, ": ", values);
}

int kind_of(const TensorDifference& difference) {
  if (!difference.second) return 0;
  if (!difference.first) return 1;
  if (difference.has_other_shape()) return 2;
  return difference.has_other_dtype() ? 3 : 4;
}

}  // namespace

Json to_json(const TensorCatalog& catalog, std::span<const int64_t> steps) {
  Json report = {{"path", catalog.path()},
                 {"format", catalog.manifest() ? "fsdp.cpp" : "safetensors"}};
  if (!steps.empty()) report["steps"] = std::vector<int64_t>(steps.begin(), steps.end());
  if (catalog.manifest()) {
    const Manifest& manifest = *catalog.manifest();
    report["step"] = manifest.step;
    report["ranks"] = manifest.num_ranks();
    report["mesh"] = {{"outer", manifest.mesh.outer}, {"inner", manifest.mesh.inner}};
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
  if (const TensorSet histories = amax_histories_of(catalog, {}); !histories.empty())
    report["amax_histories"] = set_json(histories);
  report["has_config"] = catalog.model_config().has_value();
  Json files = Json::array();
  for (const CheckedFile& file : catalog.files())
    files.push_back({{"path", file.path}, {"bytes", file.bytes}});
  report["files"] = std::move(files);
  return report;
}

Json to_json(std::span<const InspectedTensor> tensors) {
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

Json to_json(const Verification& verification) {
  Json damaged = Json::array();
  for (const DamagedPart& part : verification.damaged)
    damaged.push_back({{"path", part.path}, {"what", part.what}});
  return {{"has_checksums", verification.has_checksums},
          {"has_manifest_checksum", verification.has_manifest_checksum},
          {"files", verification.num_files},
          {"bytes", verification.bytes},
          {"damaged", std::move(damaged)}};
}

Json to_json(std::span<const TensorDifference> differences) {
  Json rows = Json::array();
  for (const TensorDifference& difference : differences) rows.push_back(row_of(difference));
  return rows;
}

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
  if (const TensorSet histories = amax_histories_of(catalog, {}); !histories.empty())
    print_row(out, "amaxes", set_text(histories, "element"));
  print_row(out, "config.json", catalog.model_config() ? "yes" : "none");
  print_row(out, "files",
            concat(catalog.files().size(), " with tensors, ", size_words(file_bytes(catalog))));
}

void print_tensors(std::ostream& out, std::span<const InspectedTensor> tensors) {
  Table table({"name", "type", "shape", "size", "parts"});
  for (const InspectedTensor& each : tensors) {
    const StoredTensor& tensor = each.tensor->tensor;
    table.add({shown(tensor.name), std::string(name_of(tensor.dtype)), list_text(tensor.shape),
               size_words(bytes_of(tensor)), std::to_string(each.tensor->boxes.size())});
  }
  table.print(out, [&](size_t row) {
    if (tensors[row].statistics) out << "  " << statistics_text(*tensors[row].statistics) << "\n";
  });
}

void print_verification(std::ostream& out, const Verification& verification) {
  for (const DamagedPart& part : verification.damaged)
    out << "damaged     " << part.path << ": " << part.what << "\n";
  const std::string read =
      concat(counted_text(verification.num_files, "file"), ", ", size_words(verification.bytes));
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

void print_differences(std::ostream& out, std::span<const TensorDifference> differences,
                       size_t most) {
  std::map<int, std::vector<const TensorDifference*>> kinds;
  for (const TensorDifference& difference : differences)
    kinds[kind_of(difference)].push_back(&difference);
  for (const auto& [kind, list] : kinds) {
    for (size_t i = 0; i < std::min(list.size(), most); ++i)
      out << difference_text(*list[i]) << "\n";
    if (list.size() > most)
      out << "... and " << list.size() - most << " more of this kind (--json has all)\n";
  }
}

}  // namespace fsdp::cli
