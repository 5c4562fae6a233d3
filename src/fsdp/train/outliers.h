// Which losses are unlike the ones before them: a z-score that bears trends, spikes and NaNs.
#pragma once

#include <cstdint>

namespace fsdp::train {

// Expects the next loss from the level and the slope of the recent ones, and measures how far it is
// off in units of how far they were. An outlier counts for little in what is expected next, so that
// a second one is still seen.
class LossOutliers {
 public:
  // The z-score of `loss` by the losses before it, which it then joins. 0 during the first steps,
  // whose deviations say nothing yet, and for a loss that is not finite, which joins nothing.
  double add(double loss);

 private:
  int64_t num_losses_ = 0;
  double level_ = 0;
  double slope_ = 0;
  double variance_ = 0;
};

// From here on a step is marked: among losses that are noise alone, one in some thousands.
constexpr double kOutlierZ = 4.0;

}  // namespace fsdp::train
