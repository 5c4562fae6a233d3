// Lets a language model write: token after token, greedily or by chance.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/nn/language_model.h"

namespace fsdp::train {

struct SamplingOptions {
  int64_t max_tokens = 200;
  // Logits are divided by it: below 1 likely tokens become likelier. 0: always the likeliest.
  double temperature = 0.0;
  // Only the likeliest tokens that together have this probability are drawn from.
  double top_p = 1.0;
  uint64_t seed = 0;
  // Ends the text, and is not part of it.
  std::optional<int64_t> end_token = std::nullopt;
  // The longest text that the model is shown; older tokens are forgotten.
  int64_t max_context = 1024;

  // UsageError naming the flag, its value and the fix.
  void validate() const;
};

// The index of the next token among these logits. `draw` is a random number in [0, 1).
int64_t choose_token(std::span<const float> logits, const SamplingOptions& options, double draw);

// What follows the prompt, which must not be empty; `on_token` hears of every token at once. All
// ranks of a sharded model call it, and all get the same: the same logits, the same draws.
std::vector<int64_t> generate(LanguageModel& model, std::span<const int64_t> prompt,
                              const SamplingOptions& options, c10::Device device,
                              const std::function<void(int64_t)>& on_token = {});

// The same for a model of bytes: text in, text out.
std::string generate_text(LanguageModel& model, const std::string& prompt,
                          const SamplingOptions& options, c10::Device device);

}  // namespace fsdp::train
