// Looks for the order of steps in which the overlapped AdamW of aarch64 is fastest on this machine:
// moves steps at random, runs the result as machine code, and keeps what was not slower (or hardly
// slower, at first). Prints the order as lines for src/fsdp/optim/overlapped_orders.h.
#include <CLI/CLI.hpp>
#include <cstdio>

#if defined(__aarch64__)

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/memory/slab_allocator.h"
#include "fsdp/optim/exact_quotient.h"
#include "fsdp/optim/overlapped_code.h"
#include "fsdp/optim/overlapped_orders.h"

namespace {

using namespace fsdp::overlapped;
using Clock = std::chrono::steady_clock;

// What is fast in a core's own caches need not be fast from memory; but runs from memory are long,
// and a search needs many. So it begins with little more than those caches hold.
struct Settings {
  Kind kind{Gradients::kFp32, Weights::kSplit};
  int64_t groups = 196608;
  int64_t groups_at_first = 8192;
  double seconds = 240;
  unsigned seed = 1;
  bool anew = false;
  bool searches = true;
};

// In the order of Do.
const char* const kNames[] = {"kLoadGradient",    "kWidenGradient",
                              "kLoadFirst",       "kDecayFirst",
                              "kUpdateFirst",     "kStoreFirst",
                              "kTestFirst",       "kScaleGradient",
                              "kLoadSecond",      "kDecaySecond",
                              "kUpdateSecond",    "kStoreSecond",
                              "kTestSecond",      "kRoot",
                              "kLoadEps",         "kDenominator",
                              "kLoadDividend",    "kEstimate",
                              "kEstimateError",   "kReciprocal",
                              "kLoadOne",         "kReciprocalError",
                              "kCloseReciprocal", "kQuotient",
                              "kRemainder",       "kExactQuotient",
                              "kDivide",          "kLoadWhole",
                              "kLoadUpper",       "kLoadLower",
                              "kWiden",           "kJoin",
                              "kDecay",           "kStoreWhole",
                              "kRound",           "kCut",
                              "kStoreUpper",      "kStoreLower",
                              "kAskGradient",     "kAskFirst",
                              "kAskSecond",       "kAskWeight",
                              "kAskLower"};
static_assert(std::size(kNames) == kAskLower + 1);

// --- running code --------------------------------------------------------------------------------

void* mapped(size_t bytes, int protection) {
  void* const memory =
      mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, /*offset=*/0);
  FSDP_CHECK(memory != MAP_FAILED, "no memory of ", bytes, " bytes");
  return memory;
}

// Memory of an optimizer, and of code that updates it.
class Runner {
 public:
  Runner(Kind kind, int64_t groups) : groups_(groups) {
    const auto numel = static_cast<size_t>(groups_ * kGroup);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto make = [&](int64_t bytes_each) {
      return slabs_.emplace_back(allocator_, static_cast<int64_t>(numel) * bytes_each, 128).at(0);
    };
    frame_.gradient = make(4);
    frame_.first = make(4);
    frame_.second = make(4);
    frame_.weight = make(4);
    frame_.lower = make(2);
    for (size_t i = 0; i < numel; ++i) {
      const float g = normal(random);
      set_gradient(kind, static_cast<int64_t>(i), g);
      static_cast<float*>(frame_.first)[i] = 0.3f * g;
      static_cast<float*>(frame_.second)[i] = 0.2f * g * g;
      static_cast<uint16_t*>(frame_.lower)[i] = 0;
    }
    const auto four = [](float x) { return FourFloats{{x, x, x, x}}; };
    frame_.beta1 = four(0.9f);
    frame_.beta2 = four(0.95f);
    frame_.to_first = four(0.1f);
    frame_.to_second = four(0.22f);
    frame_.root = four(-1500.0f);
    frame_.eps = four(-1e-3f);
    frame_.one = four(1.0f);
    frame_.decay = four(0.9999f);
    // The tests are done, but pass whatever the moments are: only one of the loops is of interest.
    frame_.tested = fsdp::ExactQuotientTest::kTested;
    frame_.added = fsdp::ExactQuotientTest::kAdded;
    frame_.groups = groups_;
  }

  // Nanoseconds per element, best of some runs.
  double time(const Code& code, int runs) {
    const size_t bytes = static_cast<size_t>(code.count) * sizeof(code.words[0]);
    std::memcpy(code_, code.words.data(), bytes);
    __builtin___clear_cache(static_cast<char*>(code_), static_cast<char*>(code_) + bytes);
    const auto run = reinterpret_cast<void (*)(const Frame&)>(code_);
    double best = 1e9;
    for (int i = 0; i < runs; ++i) {
      const Clock::time_point begin = Clock::now();
      run(frame_);
      const std::chrono::duration<double, std::nano> passed = Clock::now() - begin;
      best = std::min(best, passed.count() / static_cast<double>(groups_ * kGroup));
    }
    return best;
  }

 private:
  void set_gradient(Kind kind, int64_t i, float value) {
    void* const gradient = const_cast<void*>(frame_.gradient);
    if (kind.gradients == Gradients::kFp32) {
      static_cast<float*>(gradient)[i] = value;
    } else {
      static_cast<uint16_t*>(gradient)[i] =
          static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    }
  }

  static constexpr int kData = PROT_READ | PROT_WRITE;

  const int64_t groups_;
  fsdp::HostSlabAllocator allocator_;  // which places them as optimizers have them
  std::deque<fsdp::Slab> slabs_;
  Frame frame_;
  void* const code_ = mapped(sizeof(Code), kData | PROT_EXEC);
};

// --- orders --------------------------------------------------------------------------------------

// An order as places in the operations.
class Order {
 public:
  Order(const Operations& operations, std::span<const Step> steps) : operations_(&operations) {
    for (const Step& step : steps) places_.push_back(operations.find(step));
  }

  std::vector<Step> steps() const {
    std::vector<Step> steps;
    for (const int place : places_) steps.push_back((*operations_)[place].step);
    return steps;
  }
  Code code() const { return assembled(operations_->kind(), steps()); }

  // One to three steps go elsewhere, as far as what they need and what needs them allows.
  void move_some(std::mt19937& random) {
    for (unsigned left = 1 + random() % 3; left > 0; --left) move_one(random);
  }

 private:
  void move_one(std::mt19937& random) {
    const int count = static_cast<int>(places_.size());
    const int from = static_cast<int>(random() % places_.size());
    const int reach = random() % 4 == 0 ? count : 12;
    const Operation& moved = (*operations_)[places_[static_cast<size_t>(from)]];
    const auto may_pass = [&](int place) {
      return place >= 0 && place < count && std::abs(place - from) <= reach &&
             !moved.conflicts((*operations_)[places_[static_cast<size_t>(place)]]);
    };
    int first = from, last = from;
    while (may_pass(first - 1)) --first;
    while (may_pass(last + 1)) ++last;
    const int to = first + static_cast<int>(random() % static_cast<unsigned>(last - first + 1));
    const auto at = [&](int place) { return places_.begin() + place; };
    if (to < from) std::rotate(at(to), at(from), at(from + 1));
    if (to > from) std::rotate(at(from), at(from + 1), at(to + 1));
  }

  const Operations* operations_;
  std::vector<int> places_;
};

struct Timed {
  Order order;
  double ns;
};

// For how long, and by how much an order may be slower than the one before it at first.
struct Patience {
  double seconds;
  double slower;
};

Timed search(Patience patience, unsigned seed, Runner& runner, const Order& start) {
  std::mt19937 random(seed);
  Timed now{start, runner.time(start.code(), 10)};
  Timed best = now;
  const Clock::time_point begin = Clock::now();
  double said = 0;
  for (int64_t tried = 0;; ++tried) {
    const std::chrono::duration<double> passed = Clock::now() - begin;
    const double part = passed.count() / patience.seconds;
    if (part >= said) {
      std::printf("# %3.0f %%: %8lld orders tried, best %.3f ns per element\n", 100 * part,
                  static_cast<long long>(tried), best.ns);
      std::fflush(stdout);
      said += 0.1;
      if (now.ns > 1.02 * best.ns) now = best;
    }
    if (part >= 1) return best;
    Timed next = now;
    next.order.move_some(random);
    const Code code = next.order.code();
    if (code.count == 0) continue;  // registers do not suffice
    next.ns = runner.time(code, 2);
    const double slower = patience.slower * (1 - part) * (1 - part);
    if (next.ns >= now.ns * (1 + slower * static_cast<double>(random() % 1000) / 1000)) continue;
    if (next.ns < best.ns) next.ns = std::max(next.ns, runner.time(code, 6));  // or was it luck
    now = next;
    if (now.ns < best.ns) best = now;
  }
}

void print(const Order& order) {
  std::string line = "   ";
  for (const Step& step : order.steps()) {
    const std::string text = fsdp::concat(" {", kNames[step.what], ", ", step.of, "},");
    if (line.size() + text.size() > 100) {
      std::puts(line.c_str());
      line = "   ";
    }
    line += text;
  }
  std::puts(line.c_str());
}

int run(const Settings& settings) {
  const Operations operations(settings.kind);
  std::vector<Step> start;
  for (int i = 0; i < operations.size(); ++i) start.push_back(operations[i].step);
  for (const Found& found : kFound)
    if (!settings.anew && found.kind == settings.kind)
      start.assign(found.order.begin(), found.order.end());
  Runner runner(settings.kind, settings.groups);
  const Order first(operations, start);
  FSDP_CHECK(first.code().count > 0, "registers do not suffice for the first order");
  std::printf("# %d steps, %.3f ns per element\n", operations.size(),
              runner.time(first.code(), 30));
  if (!settings.searches) return 0;
  Runner at_first(settings.kind, std::min(settings.groups, settings.groups_at_first));
  const Patience much{.seconds = 0.75 * settings.seconds, .slower = 0.004};
  const Patience little{.seconds = 0.25 * settings.seconds, .slower = 0.0005};
  const Timed near = search(much, settings.seed, at_first, first);
  const Timed best = search(little, settings.seed, runner, near.order);
  std::printf("# found: %.3f ns per element\n", runner.time(best.order.code(), 30));
  print(best.order);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app{"Looks for a fast order of the overlapped AdamW's steps"};
  const std::map<std::string, Gradients> gradients = {{"fp32", Gradients::kFp32},
                                                      {"bf16", Gradients::kBf16}};
  const std::map<std::string, Weights> weights = {
      {"whole", Weights::kWhole}, {"separate", Weights::kSeparate}, {"split", Weights::kSplit}};
  std::string gradient = "fp32", weight = "split";
  app.add_option("--gradients", gradient)->check(CLI::IsMember(gradients));
  app.add_option("--weights", weight)->check(CLI::IsMember(weights));
  app.add_option("--groups", settings.groups, "groups of 16 elements in memory")
      ->check(CLI::PositiveNumber);
  app.add_option("--groups-at-first", settings.groups_at_first, "for three quarters of the time")
      ->check(CLI::PositiveNumber);
  app.add_option("--seconds", settings.seconds, "how long to look")->check(CLI::PositiveNumber);
  app.add_option("--seed", settings.seed, "of the random moves");
  app.add_flag("--anew", settings.anew,
               "not from the order in use, but from the one that explains");
  app.add_flag("!--no-search", settings.searches, "only time the order");
  CLI11_PARSE(app, argc, argv);
  settings.kind = {gradients.at(gradient), weights.at(weight)};
  try {
    return run(settings);
  } catch (const fsdp::Error& error) {
    std::fprintf(stderr, "bench_update_order: %s\n", error.what());
    return 1;
  }
}

#else

int main() {
  std::fputs("bench_update_order: the overlapped AdamW is for aarch64\n", stderr);
  return 1;
}

#endif
