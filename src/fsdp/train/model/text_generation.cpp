#include "fsdp/train/model/text_generation.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

namespace fsdp::train {

void SamplingOptions::validate() const {
  if (max_tokens < 1)
    throw UsageError(concat("--tokens is ", max_tokens, "; it must be 1 or more"));
  if (!(temperature >= 0 && temperature <= 100))
    throw UsageError(concat("--temperature is ", temperature,
                            "; it must be from 0 (always the likeliest token) to 100"));
  if (!(top_p > 0 && top_p <= 1))
    throw UsageError(concat("--top-p is ", top_p, "; it must be above 0 and at most 1"));
}

int64_t choose_token(std::span<const float> logits, const SamplingOptions& options, double draw) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  if (options.temperature == 0.0) return likeliest - logits.begin();

  std::vector<double> weights(logits.size());
  for (size_t i = 0; i < logits.size(); ++i)
    weights[i] = std::exp((double{logits[i]} - *likeliest) / options.temperature);
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Stable, so that every machine draws equal logits in the order of their tokens.
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return weights[a] > weights[b]; });

  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double kept = 0;
  size_t num_kept = 0;
  while (num_kept < order.size() && (num_kept == 0 || kept < options.top_p * total))
    kept += weights[order[num_kept++]];
  double left = draw * kept;
  for (size_t i = 0; i < num_kept; ++i) {
    left -= weights[order[i]];
    if (left < 0) return static_cast<int64_t>(order[i]);
  }
  return static_cast<int64_t>(order[num_kept - 1]);
}

namespace {

// The logits after a text that grows. As long as the model sees the whole text, only new tokens are
// computed; later each new token shifts the positions of all others.
class NextLogits {
 public:
  NextLogits(LanguageModel& model, int64_t max_context, c10::Device device)
      : model_(model), max_context_(static_cast<size_t>(max_context)), device_(device) {}

  // [1, vocabulary]
  at::Tensor after(const std::vector<int64_t>& text) {
    if (text.size() > max_context_)
      return model_.logits(tokens_of(std::span(text).last(max_context_))).select(1, -1);
    const at::Tensor unseen = tokens_of(std::span(text).subspan(num_seen_));
    num_seen_ = text.size();
    return model_.next_logits(unseen, cache_);
  }

 private:
  at::Tensor tokens_of(std::span<const int64_t> tokens) const {
    return at::tensor(at::ArrayRef<int64_t>(tokens.data(), tokens.size()), at::kLong)
        .unsqueeze(0)
        .to(device_);
  }

  LanguageModel& model_;
  const size_t max_context_;
  const c10::Device device_;
  DecodingCache cache_;
  size_t num_seen_ = 0;
};

}  // namespace

std::vector<int64_t> generate(LanguageModel& model, std::span<const int64_t> prompt,
                              const SamplingOptions& options, c10::Device device,
                              const std::function<void(int64_t)>& on_token) {
  options.validate();
  if (prompt.empty()) throw UsageError("--prompt is empty; give some text to begin with");
  const at::NoGradGuard no_grad;
  std::vector<int64_t> text(prompt.begin(), prompt.end());
  std::vector<int64_t> written;
  NextLogits next(model, options.max_context, device);
  while (static_cast<int64_t>(written.size()) < options.max_tokens) {
    const at::Tensor last = next.after(text).to(at::kCPU, at::kFloat).contiguous();
    const uint64_t bits = mixed_bits(mixed_bits(options.seed) + written.size());
    const double draw = static_cast<double>(bits >> 11) * 0x1p-53;
    const int64_t token = choose_token(
        {last.const_data_ptr<float>(), static_cast<size_t>(last.numel())}, options, draw);
    const auto& ends = options.end_tokens;
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) break;
    written.push_back(token);
    text.push_back(token);
    if (on_token) on_token(token);
  }
  return written;
}

}  // namespace fsdp::train
