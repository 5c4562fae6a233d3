#include "fsdp/optim/span_update.h"

#include <algorithm>

#include "fsdp/optim/update_on_cpu.h"
#include "fsdp/optim/update_on_device.h"

namespace fsdp {

namespace {

// Below this many elements waking a thread takes longer than the update.
constexpr int64_t kWorthAThread = 32768;
// With fewer a part's beginning, when nothing has been fetched for it yet, is felt.
constexpr int64_t kWorthAPart = 131072;

// Into how many parts threads cut a span. All wait for the one that ends last, and the more they
// are, the likelier one of them is late: so many of them take several parts, one after the other.
int64_t num_parts(int64_t numel, int64_t num_threads) {
  const int64_t num_awake = std::clamp<int64_t>(numel / kWorthAThread, 1, num_threads);
  const int64_t most = num_threads * std::clamp<int64_t>(num_threads / 2, 1, 8);
  return std::clamp(numel / kWorthAPart, num_awake, most);
}

void on_cpu(const UpdateSpan& span, const AdamWRule& rule, const StepState& state,
            ElementRange range) {
  adamw_on_cpu(span, rule, state, range);
}
void on_cpu(const UpdateSpan& span, const SgdRule& rule, const StepState& state,
            ElementRange range) {
  sgd_on_cpu(span, rule, state, range);
}
void on_device(const UpdateSpan& span, const AdamWRule& rule, const StepState* state,
               void* stream) {
  adamw_on_device(span, rule, state, stream);
}
void on_device(const UpdateSpan& span, const SgdRule& rule, const StepState* state, void* stream) {
  sgd_on_device(span, rule, state, stream);
}

int num_moments(const AdamWRule&) { return 2; }
int num_moments(const SgdRule& rule) { return rule.momentum == 0.0 ? 0 : 1; }

}  // namespace

void update_on_cpu(const UpdateSpan& span, const UpdateMath& math, const StepState& state,
                   ThreadTeam& team) {
  const int64_t count = num_parts(span.numel, team.size());
  std::visit(
      [&](const auto& rule) {
        check_span(span, num_moments(rule));
        team.run(count,
                 [&](int64_t i) { on_cpu(span, rule, state, piece_of_span(span, i, count)); });
      },
      math);
}

void update_on_device(const UpdateSpan& span, const UpdateMath& math, const StepState* state,
                      c10::Device device) {
  std::visit(
      [&](const auto& rule) {
        check_span(span, num_moments(rule));
        on_device(span, rule, state, current_stream(device).native_handle());
      },
      math);
}

}  // namespace fsdp
