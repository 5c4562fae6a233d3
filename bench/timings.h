// Times several contenders side by side, so that a busy machine slows all of them alike.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace bench {

struct Contender {
  std::string name;
  std::function<void()> step;
};

struct Turns {
  int rounds = 11;  // in each of which every contender has one turn
  int steps = 1;    // of a turn
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Microseconds per step by contender and round.
class Timings {
 public:
  explicit Timings(std::vector<std::vector<double>> us) : us_(std::move(us)) {}

  double median_us(size_t contender) const { return median(us_[contender]); }
  // For short steps: whatever else the machine does can only make a turn slower.
  double best_us(size_t contender) const {
    return *std::min_element(us_[contender].begin(), us_[contender].end());
  }

  // The median of quotients within a round, so that what slows a whole round drops out.
  double median_ratio(size_t contender, size_t base) const {
    return median(ratios(contender, base));
  }

  // Half of the rounds' quotients lie between these two: how far the median can be trusted.
  std::pair<double, double> ratio_quartiles(size_t contender, size_t base) const {
    std::vector<double> sorted = ratios(contender, base);
    std::sort(sorted.begin(), sorted.end());
    const size_t last = sorted.size() - 1;
    return {sorted[last / 4], sorted[last - last / 4]};
  }

 private:
  std::vector<double> ratios(size_t contender, size_t base) const {
    std::vector<double> of_rounds;
    for (size_t round = 0; round < us_[base].size(); ++round)
      of_rounds.push_back(us_[contender][round] / us_[base][round]);
    return of_rounds;
  }

  std::vector<std::vector<double>> us_;
};

// meet() is called before and after every turn, within what is timed at its end. Every other round
// goes through the contenders backwards.
inline Timings take_turns(const std::vector<Contender>& contenders, const Turns& turns,
                          const std::function<void()>& meet) {
  using Clock = std::chrono::steady_clock;
  const size_t count = contenders.size();
  std::vector<std::vector<double>> us(count);
  for (int round = 0; round < turns.rounds; ++round) {
    for (size_t turn = 0; turn < count; ++turn) {
      const size_t which = round % 2 == 0 ? turn : count - 1 - turn;
      meet();
      const auto begin = Clock::now();
      for (int step = 0; step < turns.steps; ++step) contenders[which].step();
      meet();
      const std::chrono::duration<double, std::micro> elapsed = Clock::now() - begin;
      us[which].push_back(elapsed.count() / turns.steps);
    }
  }
  return Timings(std::move(us));
}

}  // namespace bench
