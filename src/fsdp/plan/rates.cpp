#include "fsdp/plan/rates.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/plan/shipped_rates.h"

namespace fsdp {

// Fields by name; all of them must be there.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PassTimes, forward, backward)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MeasuredParts, shape, products, rows, sequence, embedding, block,
                                   head, host_us, muon_flops_per_s)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LinkSpeed, bytes_per_s, latency_us)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MeasuredLink, collective, ranks, speed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Rates, machine, host, date, torch, device, threads, cores, note,
                                   flops_per_s, bytes_per_s, offload_bytes_per_s,
                                   host_us_per_tensor, host_us_per_matrix, links, parts)

namespace {

constexpr const char* kFormat = "fsdp rates";
constexpr int64_t kMaxRatesBytes = int64_t{16} << 20;

// Whether each number is one that was measured, or 0 where it may be unknown.
bool is_sound(const Rates& rates) {
  const auto is_rate = [](double rate) { return rate > 0; };
  const auto is_time = [](const PassTimes& us) { return us.forward >= 0 && us.backward >= 0; };
  return is_rate(rates.bytes_per_s) && rates.offload_bytes_per_s >= 0 &&
         std::ranges::all_of(rates.flops_per_s,
                             [&](const auto& products) { return is_rate(products.second); }) &&
         std::ranges::all_of(rates.links,
                             [&](const MeasuredLink& link) {
                               return is_rate(link.speed.bytes_per_s) && link.speed.latency_us >= 0;
                             }) &&
         std::ranges::all_of(rates.parts, [&](const MeasuredParts& parts) {
           return parts.rows > 0 && parts.sequence > 0 && is_time(parts.embedding) &&
                  is_time(parts.block) && is_time(parts.head);
         });
}

// A line for each, so that a person can compare two files.
std::string lines_of(const std::string& field, const nlohmann::json& list) {
  std::vector<std::string> lines;
  for (const nlohmann::json& each : list) lines.push_back(concat("\n    ", each.dump()));
  return concat(",\n  \"", field, "\": [", join(lines, ","), list.empty() ? "]" : "\n  ]");
}

}  // namespace

double Rates::flops(const std::string& products) const {
  const auto found = flops_per_s.find(products);
  if (found == flops_per_s.end())
    throw UsageError(concat("the rates of ", machine, " have no products '", products,
                            "'; measure a machine that computes them with fsdp plan --calibrate, "
                            "or plan without --rates"));
  return found->second;
}

void Rates::add(MeasuredParts measured) {
  const auto same = std::ranges::find_if(parts, [&](const MeasuredParts& each) {
    return each.shape == measured.shape && each.products == measured.products &&
           each.rows == measured.rows && each.sequence == measured.sequence;
  });
  if (same != parts.end()) {
    if (measured.muon_flops_per_s == 0) measured.muon_flops_per_s = same->muon_flops_per_s;
    parts.erase(same);
  }
  parts.push_back(std::move(measured));
}

Rates parse_rates(std::string_view text, const std::string& source) {
  constexpr const char* kAdvice = "; write it anew with fsdp plan --calibrate";
  const nlohmann::json document = parse_json(text, source);
  const JsonFields fields(document, source, "");
  if (fields.text_or("format", "") != kFormat)
    throw UsageError(concat(source, " has no rates", kAdvice));
  if (const int64_t version = fields.integer("version"); version != kRatesVersion)
    throw UsageError(concat(source, ": version is ", version, ", and this command reads ",
                            kRatesVersion, kAdvice));
  try {
    Rates rates = document.get<Rates>();
    if (is_sound(rates)) return rates;
  } catch (const nlohmann::json::exception& error) {
    throw UsageError(concat(source, ": ", error.what(), kAdvice));
  }
  throw UsageError(concat(source, ": a rate is not above 0, or a time is below", kAdvice));
}

std::string rates_text(const Rates& rates) {
  nlohmann::json json = rates;
  json["format"] = kFormat;
  json["version"] = kRatesVersion;
  json.erase("links");
  json.erase("parts");
  std::string text = json.dump(2);
  text.erase(text.size() - 2);  // the end of the object
  return concat(text, lines_of("links", rates.links), lines_of("parts", rates.parts), "\n}\n");
}

std::vector<std::string> shipped_rate_names() {
  std::vector<std::string> names;
  for (const ShippedRates& rates : kShippedRates) names.emplace_back(rates.name);
  return names;
}

Rates load_rates(const std::string& name_or_path) {
  for (const ShippedRates& rates : kShippedRates)
    if (rates.name == name_or_path) return parse_rates(rates.text, name_or_path);
  if (!path_exists(name_or_path))
    throw UsageError(concat("--rates is '", name_or_path, "', which is neither a file nor one of ",
                            join(shipped_rate_names(), ", "),
                            "; fsdp plan --calibrate FILE measures this machine"));
  return parse_rates(read_text_file(name_or_path, kMaxRatesBytes), name_or_path);
}

}  // namespace fsdp
