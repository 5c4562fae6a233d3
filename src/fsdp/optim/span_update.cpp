#include "fsdp/optim/span_update.h"

#include <algorithm>

#include "fsdp/optim/update_on_cpu.h"
#include "fsdp/optim/update_on_device.h"

namespace fsdp {

namespace {

// Below this many elements waking threads takes longer than the update.
constexpr int64_t kWorthAThread = 32768;

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
  const int64_t count = std::clamp<int64_t>(span.numel / kWorthAThread, 1, team.size());
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
