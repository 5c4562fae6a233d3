// A chart of figures over steps, as a self-contained piece of HTML.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::train {

struct ChartPoint {
  double step = 0;
  double value = 0;  // not finite: the line has a gap
};

struct ChartLine {
  enum class Look { kFaint, kMain, kDots };

  std::string name = {};  // in the legend
  Look look = Look::kMain;
  std::vector<ChartPoint> points = {};
  // Tells runs apart: 0, 1, ...; -1: the colour of the look.
  int color = -1;
  // The tokens trained on by some steps, between which they grow evenly; none: not known.
  std::vector<ChartPoint> tokens = {};
};

// The lowest and the highest value of some steps.
struct ChartRange {
  double step = 0;
  double low = 0;
  double high = 0;
};

struct LineChart {
  // Unique on the page, of letters and dashes.
  std::string id = {};
  std::string title = {};
  std::string unit = {};
  // Describes the chart in a sentence for people who do not see it.
  std::string description = {};
  std::vector<ChartLine> lines = {};
  // Drawn as an area behind the lines, where a point stands for several steps.
  std::vector<ChartRange> ranges = {};
  // Steps with a vertical rule: the run was resumed there.
  std::vector<double> marks = {};
  // The axis begins at 0, so that half the value is half as high.
  bool begins_at_zero = false;
  // Cuts off a few values far above the others (the first step), and says so in words.
  bool cuts_peaks = false;
  // Takes the whole width of the page.
  bool is_wide = false;
  // A sentence below; HTML.
  std::string note = {};
};

// "" without a finite value.
std::string line_chart_html(const LineChart& chart);

// The classes of a run's colour, of lines and keys: "c2".
std::string run_color_classes(size_t index);

// "2.46 M": three digits are enough for a glance.
std::string count_text(int64_t count);

// "412", "1.923", "3.00e-04", "19,882": a figure in a sentence.
std::string figure_text(double value);

}  // namespace fsdp::train
