#include "fsdp/train/run_sequence.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/data/documents.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/run_data.h"

namespace fsdp::train {

namespace {

constexpr int64_t kTextSequence = 1024;
constexpr int64_t kFewWindows = 100;  // of a text that is shorter than so many long ones

// Sequences of such lengths are computed faster, and ranks of a tp group share them.
int64_t multiple_of(const TrainOptions& options) { return std::lcm(int64_t{64}, options.tp); }

}  // namespace

void choose_sequence(RunPlan& plan) {
  TrainOptions& options = plan.options;
  const Corpus& corpus = *plan.corpus;
  const bool are_rows = corpus.has_mask();
  const bool is_tuned = !plan.init.empty();
  if (!options.documents && is_tuned && are_rows && corpus.end_of_document())
    options.documents = WindowDocuments::kPacked;
  options.documents = window_documents(options.documents, corpus);
  if (options.sequence || !is_tuned) return;
  const int64_t positions = max_positions_of(plan.model.config);
  int64_t wanted = std::clamp(corpus.num_tokens() / kFewWindows, options.sequence_length(),
                              std::max(options.sequence_length(), kTextSequence));
  std::vector<int64_t> lengths = row_lengths(corpus);
  if (!lengths.empty()) {
    const auto most = lengths.begin() + static_cast<int64_t>(lengths.size() - 1) * 99 / 100;
    std::nth_element(lengths.begin(), most, lengths.end());
    wanted = *most;
    plan.sequence_reason = "of 99 % of the rows";
  }
  const int64_t longest = positions - positions % options.tp;
  options.sequence = round_up(wanted, multiple_of(options));
  if (*options.sequence <= longest) return;
  options.sequence = longest;
  plan.sequence_reason = "all positions of the model";
}

void fit_sequence(RunPlan& plan, const Planner& planner, const RankDevice& device) {
  TrainOptions& options = plan.options;
  const auto is_known = [&] {
    return device.device == DeviceChoice::kCuda &&
           knows_activations(planner.model(), device.compute, options.sequence_length());
  };
  const auto peak = [&] {
    return forecast_peak(planner.model(), planner.groups(), plan.forecast,
                         peak_options(options, plan.num_ranks));
  };
  if (!is_known()) return;
  plan.peak = peak();
  if (plan.given.sequence || device.memory_bytes == 0) return;
  // The allocator cannot use all of it: freed pieces do not fit together.
  const int64_t usable = device.memory_bytes / 20 * 19;
  const int64_t least = round_up(plan.given.sequence_length(), multiple_of(options));
  while (plan.peak->total() > usable && options.sequence_length() > least) {
    options.sequence =
        std::max(least, round_up(options.sequence_length() / 2, multiple_of(options)));
    plan.sequence_reason =
        concat("for a step within the ", bytes_text(device.memory_bytes), " of a rank");
    plan.peak = peak();
  }
}

}  // namespace fsdp::train
