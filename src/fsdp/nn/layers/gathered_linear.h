// Projections of a sequence whose tokens the ranks of a tp group share: each computes some outputs,
// of all tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp {
class MeshAxis;
}

namespace fsdp::nn {

// own: this rank's tokens, [batch, sequence / tp, in]; weights: [outputs of this rank, in]; biases:
// one for each, or none at all. Results: [batch, sequence, outputs].
//
// Keeps the own tokens for the backward, which gathers the others again: the memory of a layer's
// input is divided by tp. The gradient of the tokens travels while those of the weights are
// computed.
//
// Under quantised weights with scales of rows, codes of tokens are kept and travel, with a scale
// per token; under others numbers do, which are quantised where they arrive.
std::vector<at::Tensor> gathered_linear(const at::Tensor& own,
                                        const std::vector<at::Tensor>& weights,
                                        const std::vector<at::Tensor>& biases, const MeshAxis& tp);

}  // namespace fsdp::nn
