// Which losses are called outliers, on curves like those of training.
#include "fsdp/train/log/run_history.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace fsdp::train::outliers_test {
namespace {

// A loss that falls fast and then slowly, with noise of deviation 0.05.
class Curve {
 public:
  double next() {
    ++step_;
    return 2 + 3.5 * std::exp(-static_cast<double>(step_) / 80) + noise_(random_);
  }

 private:
  int64_t step_ = 0;
  std::mt19937 random_{7};
  std::normal_distribution<double> noise_{0, 0.05};
};

TEST(LossOutliers, SaysNothingDuringTheFirstSteps) {
  LossOutliers outliers;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(outliers.add(i % 2 == 0 ? 1.0 : 100.0), 0) << i;
}

TEST(LossOutliers, MarksNextToNothingOfAnOrdinaryCurve) {
  LossOutliers outliers;
  Curve curve;
  int num_marked = 0;
  for (int i = 0; i < 10000; ++i) num_marked += std::abs(outliers.add(curve.next())) >= kOutlierZ;
  // Normal noise is beyond four deviations in 0.6 of 10,000; the estimated deviation adds some.
  EXPECT_LE(num_marked, 5);
}

TEST(LossOutliers, MeasuresASpikeInDeviationsOfTheNoise) {
  LossOutliers outliers;
  Curve curve;
  for (int i = 0; i < 1000; ++i) outliers.add(curve.next());
  EXPECT_NEAR(outliers.add(2 + 10 * 0.05), 10, 3);
  EXPECT_NEAR(outliers.add(2 - 10 * 0.05), -10, 3);
}

TEST(LossOutliers, SeesASecondSpikeAfterTheFirst) {
  LossOutliers outliers;
  Curve curve;
  for (int i = 0; i < 500; ++i) outliers.add(curve.next());
  EXPECT_GT(outliers.add(1e6), kOutlierZ);
  EXPECT_GT(outliers.add(3), kOutlierZ);
}

TEST(LossOutliers, GetsUsedToANewLevel) {
  LossOutliers outliers;
  Curve curve;
  for (int i = 0; i < 500; ++i) outliers.add(curve.next());
  double z = 0;
  for (int i = 0; i < 100; ++i) z = outliers.add(curve.next() + 5);
  EXPECT_LT(std::abs(z), kOutlierZ);
}

TEST(LossOutliers, LeavesOutWhatIsNotFinite) {
  LossOutliers with;
  LossOutliers without;
  Curve curve;
  for (int i = 0; i < 200; ++i) {
    const double loss = curve.next();
    if (i % 7 == 0) {
      EXPECT_EQ(with.add(std::numeric_limits<double>::quiet_NaN()), 0);
      EXPECT_EQ(with.add(std::numeric_limits<double>::infinity()), 0);
    }
    EXPECT_EQ(with.add(loss), without.add(loss));
  }
}

TEST(LossOutliers, FindsNothingInEqualLosses) {
  LossOutliers outliers;
  for (int i = 0; i < 300; ++i) EXPECT_LT(std::abs(outliers.add(2.5 + 1e-12 * (i % 3))), 0.1) << i;
}

}  // namespace
}  // namespace fsdp::train::outliers_test
