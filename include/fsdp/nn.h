// Models: language models by configuration, and layers that write gradients where they are reduced.
#pragma once

#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/logit_memory.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/linear.h"
