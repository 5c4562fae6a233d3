// Everything a program needs that trains its own model with fsdp.cpp. The models and the data of
// the command `fsdp` have headers of their own: fsdp/nn.h and fsdp/data.h.
#pragma once

#include "fsdp/base/error.h"
#include "fsdp/base/version.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/comm/world.h"
#include "fsdp/graph/graph.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/learning_rate.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/shard/call_unit.h"
#include "fsdp/shard/direct_gradient.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parallel_module.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/shard/recompute.h"
#include "fsdp/shard/sharded.h"
#include "fsdp/shard/unit.h"
