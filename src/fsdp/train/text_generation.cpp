#include "fsdp/train/text_generation.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fsdp/base/error.h"
#include "fsdp/base/mixed_bits.h"
#include "fsdp/data/byte_tokenizer.h"

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
  // Stable: equal logits are drawn in the order of their tokens, on every machine.
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

std::vector<int64_t> generate(LanguageModel& model, std::span<const int64_t> prompt,
                              const SamplingOptions& options, c10::Device device,
                              const std::function<void(int64_t)>& on_token) {
  options.validate();
  if (prompt.empty()) throw UsageError("--prompt is empty; give some text to begin with");
  const at::NoGradGuard no_grad;
  std::vector<int64_t> text(prompt.begin(), prompt.end());
  std::vector<int64_t> written;
  while (static_cast<int64_t>(written.size()) < options.max_tokens) {
    const size_t shown = std::min(text.size(), static_cast<size_t>(options.max_context));
    const at::Tensor tokens = at::from_blob(text.data() + (text.size() - shown),
                                            {1, static_cast<int64_t>(shown)}, at::kLong);
    const at::Tensor last =
        model.logits(tokens.to(device)).select(1, -1).to(at::kCPU, at::kFloat).contiguous();
    const uint64_t bits = mixed_bits(mixed_bits(options.seed) + written.size());
    const double draw = static_cast<double>(bits >> 11) * 0x1p-53;
    const int64_t token = choose_token(
        {last.const_data_ptr<float>(), static_cast<size_t>(last.numel())}, options, draw);
    if (token == options.end_token) break;
    written.push_back(token);
    text.push_back(token);
    if (on_token) on_token(token);
  }
  return written;
}

std::string generate_text(LanguageModel& model, const std::string& prompt,
                          const SamplingOptions& options, c10::Device device) {
  std::vector<int64_t> tokens(prompt.size());
  encode_bytes(prompt, std::span(tokens));
  SamplingOptions with_end = options;
  with_end.end_token = kByteEndOfDocument;
  return decode_bytes(generate(model, tokens, with_end, device));
}

}  // namespace fsdp::train
