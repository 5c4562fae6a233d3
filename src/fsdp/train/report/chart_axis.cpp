#include "fsdp/train/report/chart_axis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "fsdp/base/text.h"

namespace fsdp::train {

namespace {

constexpr int kNumSteps = 5;

// The nearest of 1, 2, 5, 10 times a power of ten that cuts `range` into about kNumSteps.
double round_step(double range) {
  const double rough = range / kNumSteps;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double digit = rough / power;
  return power * (digit < 1.5 ? 1 : digit < 3 ? 2 : digit < 7.5 ? 5 : 10);
}

std::string with_digits(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::vector<AxisTick> linear_ticks(double low, double high) {
  const double step = round_step(high - low);
  const double largest = std::max(std::abs(low), std::abs(high));
  std::vector<AxisTick> ticks;
  // Multiples of the step, not sums: 0.1 + 0.1 + 0.1 is not 0.3.
  for (double i = std::ceil(low / step - 1e-6); i * step <= high + step * 1e-6; ++i)
    ticks.push_back({i * step, tick_label(i * step, step, largest)});
  return ticks;
}

std::vector<AxisTick> logarithmic_ticks(double low, double high) {
  const double decades = std::log10(high / low);
  std::vector<AxisTick> ticks;
  const double first = std::floor(std::log10(low));
  const double every = std::ceil(decades / (kNumSteps + 1));  // decades between ticks
  for (double exponent = first; exponent <= std::log10(high) + 1e-9; exponent += 1) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      if (digit != 1 && decades > 2.5) continue;
      if (std::fmod(exponent - first, every) != 0) continue;
      const double value = digit * std::pow(10.0, exponent);
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9))
        ticks.push_back({value, tick_label(value, value, value)});
    }
  }
  return ticks;
}

}  // namespace

std::string formatted(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

ChartAxis::ChartAxis(double low, double high, Scale scale) : low_(low), high_(high), scale_(scale) {
  if (scale_ == Scale::kLogarithmic && !(low_ > 0)) scale_ = Scale::kLinear;
  // Relative to the values, so that rounding errors do not count as a difference.
  if (high_ - low_ > 1e-9 * std::max(std::abs(low_), std::abs(high_))) return;
  const double margin = low_ == 0 ? 1 : std::abs(low_) * 0.1;
  low_ -= margin;
  high_ = low_ + 2 * margin;
}

ChartAxis ChartAxis::rounded(double low, double high, Scale scale) {
  ChartAxis axis(low, high, scale);
  if (axis.scale_ == Scale::kLogarithmic) return axis;
  const double step = round_step(axis.high_ - axis.low_) / 2;
  axis.low_ = std::floor(axis.low_ / step + 1e-6) * step;
  axis.high_ = std::ceil(axis.high_ / step - 1e-6) * step;
  return axis;
}

double ChartAxis::position(double value) const {
  if (scale_ == Scale::kLinear) return (value - low_) / (high_ - low_);
  if (!(value > 0)) return 0;
  return std::log(value / low_) / std::log(high_ / low_);
}

std::vector<AxisTick> ChartAxis::ticks() const {
  return scale_ == Scale::kLinear ? linear_ticks(low_, high_) : logarithmic_ticks(low_, high_);
}

std::string tick_label(double value, double step, double largest) {
  const double size = std::abs(largest);
  if (value == 0) return "0";
  // The digits that neighbouring ticks need to differ, in this unit.
  const auto digits = [&](double unit) {
    return std::clamp(static_cast<int>(-std::floor(std::log10(std::abs(step) / unit) + 1e-9)), 0,
                      6);
  };
  if (size < 1e-3) {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "%.2g", value);
    return text.data();
  }
  if (size >= 1e15) return concat(value);
  if (size >= 1e9) return with_digits(value / 1e9, digits(1e9)) + "G";
  if (size >= 1e6) return with_digits(value / 1e6, digits(1e6)) + "M";
  if (size >= 1e4) return with_digits(value / 1e3, digits(1e3)) + "k";
  if (digits(1) == 0) return grouped_text(std::llround(value));
  return with_digits(value, digits(1));
}

}  // namespace fsdp::train
