// Lets a language model write text: token after token, greedily or by chance.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "fsdp/nn/language_model.h"

namespace fsdp::train {

struct SamplingOptions {
  int64_t max_tokens = 200;
  // Divides the logits: below 1, likely tokens become likelier. 0: always the likeliest one.
  double temperature = 0.0;
  // Only the likeliest tokens that together have this probability are drawn from.
  double top_p = 1.0;
  uint64_t seed = 0;
  // These tokens end the text, and are not part of it.
  std::vector<int64_t> end_tokens = {};
  // The model sees at most this many tokens; older ones are forgotten.
  int64_t max_context = 1024;

  // UsageError naming the flag, its value and the fix.
  void validate() const;
};

// The index of the next token among these logits. `draw` is a random number in [0, 1).
int64_t choose_token(std::span<const float> logits, const SamplingOptions& options, double draw);

// The tokens after the prompt, which must not be empty; `on_token` gets each one at once. All ranks
// of a sharded model call it and get the same tokens, from the same logits and draws.
std::vector<int64_t> generate(LanguageModel& model, std::span<const int64_t> prompt,
                              const SamplingOptions& options, c10::Device device,
                              const std::function<void(int64_t)>& on_token = {});

}  // namespace fsdp::train
