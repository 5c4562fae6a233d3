// What an optimizer is made with, as facts that ranks compare.
#pragma once

#include "fsdp/comm/rank_facts.h"
#include "fsdp/optim/optimizer.h"

namespace fsdp {

// By the names of the options' fields. A rate that is set later is not among them.
RankFacts optimizer_facts(const UpdateRule& rule, const StepOptions& step);

}  // namespace fsdp
