// The data of a run: opened with the tokenizer that its text needs, and a vocabulary that fits.
#pragma once

#include "fsdp/train/run_plan.h"

namespace fsdp::train {

// Opens --data and --validation-data, and makes --sample tokens where a tokenizer of the data's
// tokens is at hand. Needs the plan's options, model and init.
void open_data(RunPlan& plan);

// Gives the model the vocabulary of --vocabulary; or a preset that of the data, rounded up to a
// multiple of 64, if it has more tokens. UsageError if the model has fewer than the data.
void fit_vocabulary(RunPlan& plan);

}  // namespace fsdp::train
