// Rates that a machine reaches in a sustained load, from which `fsdp plan` forecasts the time of a
// step.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// The form of the file. Another number is refused: its figures would mean something else.
inline constexpr int64_t kRatesVersion = 2;

// Microseconds of one unit.
struct PassTimes {
  double forward = 0;
  double backward = 0;
};

// The units of a model as one rank trained them, without recomputation.
struct MeasuredParts {
  std::string shape;     // shape_text() of the model (unit_costs.h)
  std::string products;  // "bf16", "fp8-row": products_name()
  int64_t rows = 0;      // sequences at a time
  int64_t sequence = 0;
  PassTimes embedding, block, head;
  double host_us = 0;  // to ask for one block's forward, backward and update; 0: a CPU
  // Newton-Schulz iterations of its matrices, with all else of Muon's update; 0: not measured.
  double muon_flops_per_s = 0;
};

// The bandwidth of one rank over an axis, beside all others.
struct LinkSpeed {
  double bytes_per_s = 0;
  double latency_us = 0;  // of a collective
};

struct MeasuredLink {
  std::string collective;  // "all_gather"
  int64_t ranks = 0;
  LinkSpeed speed;
};

struct Rates {
  std::string machine;  // "NVIDIA H200"
  std::string host;     // "x86_64, 16 cores"
  std::string date;
  std::string torch;      // "": nothing was measured
  std::string device;     // "cuda", "cpu"
  int64_t threads = 0;    // of the host, that a rank computes with
  int64_t cores = 0;      // of the host; 0: not known
  std::string note = {};  // what a reader should know
  // The roofline: what blocks reach by the type of their products, and "muon TYPE" updates.
  std::map<std::string, double> flops_per_s = {};
  double bytes_per_s = 0;          // of memory, as an update reads and writes it
  double offload_bytes_per_s = 0;  // the same of state on the host, copies included; 0: not known
  double host_us_per_tensor = 0;   // to ask for a tensor's part of a step
  double host_us_per_matrix = 0;   // and of Muon's update
  std::vector<MeasuredLink> links = {};
  std::vector<MeasuredParts> parts = {};

  // UsageError that names the products and says how to measure them.
  double flops(const std::string& products) const;
  // In place of those of the same shape, products and batch, from which it takes what it has not.
  void add(MeasuredParts measured);
};

// UsageError in one sentence that begins with `source`.
Rates parse_rates(std::string_view text, const std::string& source);
std::string rates_text(const Rates& rates);

// The rates that the command carries: "h200", ...
std::vector<std::string> shipped_rate_names();

// Shipped rates, or a file. UsageError with the names there are.
Rates load_rates(const std::string& name_or_path);

}  // namespace fsdp
