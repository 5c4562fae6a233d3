// The whole weights of a step, written for others beside the training (--export-dir).
#pragma once

#include <cstdint>
#include <string>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/settings/train_options.h"

namespace fsdp::train {

// Writes EXPORT_DIR/step-NNNNNNNN, in place of an older one: a resumed run comes to steps again
// that it has exported. `published` is rank 0's, who writes. All ranks call it. Returns a line for
// the console.
std::string export_step(const TrainOptions& options, const CheckpointState& state,
                        const NameRules& names, const PublishedModel& published, int64_t step);

}  // namespace fsdp::train
