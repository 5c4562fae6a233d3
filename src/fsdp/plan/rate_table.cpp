#include "fsdp/plan/rate_table.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/plan/shipped_rates.h"

namespace fsdp {

namespace {

constexpr const char* kFormat = "fsdp rates";
constexpr int64_t kMaxRatesBytes = int64_t{16} << 20;
constexpr const char* kAdvice = "write it anew with fsdp plan --calibrate";

size_t num_points(const RateGrid& grid) {
  size_t count = 1;
  for (const std::vector<int64_t>& axis : grid.points) count *= axis.size();
  return count;
}

// The point at or below the size, and how far it is from there to the next one.
struct Between {
  size_t index = 0;
  double share = 0.0;
  double beyond = 1.0;  // how many times the last point
};

Between between(const std::vector<int64_t>& points, int64_t size) {
  if (size <= points.front() || points.size() == 1)
    return {.beyond = size > points.back()
                          ? static_cast<double>(size) / static_cast<double>(points.back())
                          : 1.0};
  if (size >= points.back())
    return {.index = points.size() - 1,
            .beyond = static_cast<double>(size) / static_cast<double>(points.back())};
  const auto next = std::upper_bound(points.begin(), points.end(), size);
  const auto low = static_cast<double>(*(next - 1));
  return {.index = static_cast<size_t>(next - points.begin()) - 1,
          .share = std::log(static_cast<double>(size) / low) /
                   std::log(static_cast<double>(*next) / low)};
}

std::vector<int64_t> whole_numbers(const JsonFields& grid, const char* field,
                                   const nlohmann::json& list) {
  std::vector<int64_t> numbers;
  for (const nlohmann::json& number : list) {
    const bool rises = number.is_number_integer() &&
                       number.get<int64_t>() > (numbers.empty() ? 0 : numbers.back());
    if (!rises) grid.refuse(field, concat("it needs rising whole numbers above 0; ", kAdvice));
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

RateGrid parse_grid(const JsonFields& fields) {
  fields.allow_only({"work", "axes", "points", "us"});
  RateGrid grid{.work = fields.text("work"), .points = {}, .us = {}};
  for (const nlohmann::json& name : fields.array("axes"))
    grid.axes.push_back(name.is_string() ? name.get<std::string>() : std::string());
  for (const nlohmann::json& axis : fields.array("points")) {
    grid.points.push_back(whole_numbers(fields, "points", axis));
    if (grid.points.back().empty()) fields.refuse("points", concat("an axis has none; ", kAdvice));
  }
  if (grid.axes.size() != grid.points.size())
    fields.refuse("axes", concat("each needs its points; ", kAdvice));
  for (const nlohmann::json& us : fields.array("us")) {
    if (!us.is_number() || !(us.get<double>() > 0.0))
      fields.refuse("us", concat("it needs numbers above 0; ", kAdvice));
    grid.us.push_back(us.get<double>());
  }
  if (grid.us.size() != num_points(grid))
    fields.refuse("us", concat("it needs ", num_points(grid), " numbers; ", kAdvice));
  return grid;
}

}  // namespace

double RateGrid::us_at(std::span<const int64_t> sizes) const {
  FSDP_ASSERT(sizes.size() == points.size());
  std::vector<Between> places;
  double beyond = 1.0;
  for (size_t axis = 0; axis < points.size(); ++axis) {
    places.push_back(between(points[axis], sizes[axis]));
    beyond *= places.back().beyond;
  }
  double log_us = 0.0;
  for (size_t corner = 0; corner < size_t{1} << points.size(); ++corner) {
    double weight = 1.0;
    size_t index = 0;
    for (size_t axis = 0; axis < points.size(); ++axis) {
      const bool is_next = (corner >> axis & 1) != 0;
      weight *= is_next ? places[axis].share : 1.0 - places[axis].share;
      const size_t last = points[axis].size() - 1;
      index = index * points[axis].size() + std::min(places[axis].index + (is_next ? 1 : 0), last);
    }
    if (weight > 0.0) log_us += weight * std::log(us[index]);
  }
  return std::exp(log_us) * beyond;
}

const RateGrid* RateTable::find(std::string_view work) const {
  const auto found = std::find_if(grids.begin(), grids.end(),
                                  [&](const RateGrid& grid) { return grid.work == work; });
  return found == grids.end() ? nullptr : &*found;
}

double RateTable::us(std::string_view work, std::span<const int64_t> sizes) const {
  const RateGrid* grid = find(work);
  if (grid == nullptr)
    throw UsageError(concat("the rates of ", machine, " (", date, ") have no '", work,
                            "'; measure a machine that computes it with fsdp plan --calibrate, or "
                            "plan without --rates"));
  return grid->us_at(sizes);
}

RateTable parse_rates(std::string_view text, const std::string& source) {
  const nlohmann::json document = parse_json(text, source);
  const JsonFields fields(document, source, "");
  if (fields.text_or("format", "") != kFormat)
    throw UsageError(concat(source, " is no table of rates; ", kAdvice));
  if (const int64_t version = fields.integer("version"); version != kRatesVersion)
    throw UsageError(concat(source, ": version is ", version, ", and this command reads ",
                            kRatesVersion, "; ", kAdvice));
  fields.allow_only({"format", "version", "machine", "host", "date", "torch", "device", "threads",
                     "cores", "note", "grids"});
  RateTable table{.machine = fields.text("machine"),
                  .host = fields.text("host"),
                  .date = fields.text("date"),
                  .torch = fields.text("torch"),
                  .device = fields.text("device"),
                  .threads = fields.integer("threads"),
                  .cores = fields.integer_or("cores", 0),
                  .note = fields.text_or("note", "")};
  for (size_t i = 0; i < fields.array("grids").size(); ++i)
    table.grids.push_back(parse_grid(fields.element("grids", i)));
  return table;
}

std::string rates_text(const RateTable& table) {
  nlohmann::ordered_json json = {{"format", kFormat},        {"version", kRatesVersion},
                                 {"machine", table.machine}, {"host", table.host},
                                 {"date", table.date},       {"torch", table.torch},
                                 {"device", table.device},   {"threads", table.threads},
                                 {"cores", table.cores},     {"note", table.note}};
  // A line for each grid, so that a person can compare two files.
  std::string text = json.dump(2);
  text.erase(text.size() - 2);  // the end of the object
  text += ",\n  \"grids\": [";
  for (size_t i = 0; i < table.grids.size(); ++i) {
    const RateGrid& grid = table.grids[i];
    std::vector<std::string> us;
    for (const double number : grid.us) {
      std::ostringstream out;
      out << number;  // six digits, more than a measurement has
      us.push_back(out.str());
    }
    const nlohmann::ordered_json head = {
        {"work", grid.work}, {"axes", grid.axes}, {"points", grid.points}};
    std::string line = head.dump();
    line.pop_back();
    text += concat(i == 0 ? "" : ",", "\n    ", line, ",\"us\":[", join(us, ","), "]}");
  }
  return text + "\n  ]\n}\n";
}

std::vector<std::string> shipped_rate_names() {
  std::vector<std::string> names;
  for (const ShippedRates& rates : kShippedRates) names.emplace_back(rates.name);
  return names;
}

RateTable load_rates(const std::string& name_or_path) {
  for (const ShippedRates& rates : kShippedRates)
    if (rates.name == name_or_path) return parse_rates(rates.text, name_or_path);
  if (!path_exists(name_or_path))
    throw UsageError(concat("--rates is '", name_or_path, "', which is neither a file nor one of ",
                            join(shipped_rate_names(), ", "),
                            "; fsdp plan --calibrate FILE measures this machine"));
  return parse_rates(read_text_file(name_or_path, kMaxRatesBytes), name_or_path);
}

}  // namespace fsdp
