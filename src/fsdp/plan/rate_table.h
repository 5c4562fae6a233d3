// Times that were measured on one machine, from which `fsdp plan` forecasts those of a step.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// The form of the file. Another number is refused: its figures would mean something else.
inline constexpr int64_t kRatesVersion = 1;

// One kind of work: its time at the points of a grid of sizes.
struct RateGrid {
  std::string work;                          // "product bf16 forward"
  std::vector<std::string> axes = {};        // "tokens", "out", "in"; none: one number
  std::vector<std::vector<int64_t>> points;  // of each axis, rising
  std::vector<double> us;                    // microseconds; the last axis runs fastest

  // Between points it is a power of each size, beyond the last ones proportional to it; below the
  // first ones it is the first one's.
  double us_at(std::span<const int64_t> sizes) const;
};

struct RateTable {
  std::string machine;  // "NVIDIA H200"
  std::string host;     // "x86_64, 16 cores"
  std::string date;
  std::string torch;
  std::string device;     // "cuda", "cpu"
  int64_t threads = 0;    // of the host, that a rank computes with
  int64_t cores = 0;      // of the host; 0: not known
  std::string note = {};  // what a reader should know
  std::vector<RateGrid> grids = {};

  // nullptr: it was not measured.
  const RateGrid* find(std::string_view work) const;
  // UsageError that names the work and how to measure it.
  double us(std::string_view work, std::span<const int64_t> sizes) const;
};

// UsageError in one sentence that begins with `source`.
RateTable parse_rates(std::string_view text, const std::string& source);
std::string rates_text(const RateTable& table);

// The tables that the command carries: "h200", ...
std::vector<std::string> shipped_rate_names();

// A shipped table, or a file. UsageError with the names there are.
RateTable load_rates(const std::string& name_or_path);

}  // namespace fsdp
