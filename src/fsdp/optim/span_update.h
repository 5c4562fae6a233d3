// One span's update where its memory is: threads on the CPU, a kernel on a device.
#pragma once

#include <c10/core/Device.h>

#include <variant>

#include "fsdp/base/device_stream.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/optim/thread_team.h"
#include "fsdp/optim/update_rules.h"
#include "fsdp/optim/update_span.h"

namespace fsdp {

using UpdateMath = std::variant<AdamWRule, SgdRule>;

// On the CPU, by the team.
void update_on_cpu(const UpdateSpan& span, const UpdateMath& math, const StepState& state,
                   ThreadTeam& team);

// Enqueued on the device's current stream; `state` is memory of the device.
void update_on_device(const UpdateSpan& span, const UpdateMath& math, const StepState* state,
                      c10::Device device);

}  // namespace fsdp
