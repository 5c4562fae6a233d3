#include "fsdp/train/outliers.h"

#include <algorithm>
#include <cmath>

namespace fsdp::train {

namespace {

constexpr int64_t kFirstSteps = 20;
// The recent losses are about the last 2 / weight - 1 ones: 19 for the level, which follows the
// falling loss of the first hundreds of steps, 49 for the deviation, and 99 for the slope, the
// noisiest of the three.
constexpr double kLevelWeight = 0.1;
constexpr double kSlopeWeight = 0.02;
constexpr double kVarianceWeight = 0.04;
// Equal losses have no deviation; rounding alone makes none of them an outlier.
constexpr double kLeastDeviation = 1e-6;

}  // namespace

double LossOutliers::add(double loss) {
  if (!std::isfinite(loss)) return 0;
  ++num_losses_;
  if (num_losses_ == 1) {
    level_ = loss;
    return 0;
  }
  const double expected = level_ + slope_;
  const double deviation = std::max(std::sqrt(variance_), kLeastDeviation * std::abs(level_));
  double residual = loss - expected;
  const bool is_early = num_losses_ <= kFirstSteps;
  const double z = is_early || deviation == 0 ? 0 : residual / deviation;
  if (!is_early) residual = std::clamp(residual, -kOutlierZ * deviation, kOutlierZ * deviation);

  // While there are few losses, each one weighs as much as the others.
  const double fair = 1.0 / static_cast<double>(num_losses_);
  const double old_level = level_;
  level_ = expected + std::max(kLevelWeight, fair) * residual;
  slope_ += std::max(kSlopeWeight, fair) * (level_ - old_level - slope_);
  variance_ += std::max(kVarianceWeight, fair) * (residual * residual - variance_);
  return z;
}

}  // namespace fsdp::train
