// Hears from autograd when a parameter's gradient is complete, and offers layers a place for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "fsdp/shard/engine.h"

namespace fsdp {

// Attaches to the gradient accumulators of all trainable parameters; what is returned keeps them
// (and the hooks with them) alive.
//
// The hook is on the accumulator and not a tensor's post-accumulate hook: it also runs when no
// gradient came through autograd, because the layer wrote it directly. Either way it runs once per
// backward, after all uses of the parameter.
std::shared_ptr<void> attach_gradient_hooks(const std::shared_ptr<Engine>& engine);

// Makes accumulators anew. Autograd runs one on the stream that was current when it was made, and a
// step that is recorded into a graph must run on the graph's stream alone.
void attach_gradient_hooks_anew(Engine& engine);

// Whether the parameter is a trainable one of a model that is sharded.
bool has_gradient_hook(const at::Tensor& parameter);

}  // namespace fsdp
