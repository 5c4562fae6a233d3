// The scale of a chart's axis: where a value lies, and which round values are written beside it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::train {

struct AxisTick {
  double value = 0;
  std::string label = {};
};

class ChartAxis {
 public:
  enum class Scale { kLinear, kLogarithmic };

  // From `low` to `high`, both finite; equal ends are widened. A logarithmic axis needs positive
  // ends.
  ChartAxis(double low, double high, Scale scale);

  // Widened to round numbers.
  static ChartAxis rounded(double low, double high, Scale scale);

  Scale scale() const { return scale_; }
  double low() const { return low_; }
  double high() const { return high_; }

  // 0 at the low end, 1 at the high end, and beyond these outside; 0 for a value without a place.
  double position(double value) const;

  // About five, of the form 1, 2 or 5 times a power of ten.
  std::vector<AxisTick> ticks() const;

 private:
  double low_;
  double high_;
  Scale scale_;
};

// Formats a number as printf does.
std::string formatted(const char* format, double value);

// "0", "0.002", "1,500", "20k", "3M", "5e-05": in as many digits as ticks that are `step` apart
// need, and in the unit of the largest one beside it.
std::string tick_label(double value, double step, double largest);

}  // namespace fsdp::train
