#include "fsdp/shard/parameter_init.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "fsdp/base/error.h"

namespace fsdp {

namespace {

namespace nn = torch::nn;

template <typename Layer>
bool reset_if(nn::Module& module) {
  auto* layer = dynamic_cast<Layer*>(&module);
  if (layer != nullptr) layer->reset_parameters();
  return layer != nullptr;
}

template <typename... Layers>
bool reset_if_any(nn::Module& module) {
  return (reset_if<Layers>(module) || ...);
}

}  // namespace

void initialize_parameters(nn::Module& module, const std::string& name) {
  const bool is_known =
      reset_if_any<ParameterInit, nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl,
                   nn::EmbeddingBagImpl, nn::LayerNormImpl, nn::GroupNormImpl, nn::BatchNorm1dImpl,
                   nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::Conv1dImpl, nn::Conv2dImpl,
                   nn::Conv3dImpl, nn::ConvTranspose1dImpl, nn::ConvTranspose2dImpl,
                   nn::ConvTranspose3dImpl, nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl>(module);
  FSDP_CHECK(is_known, "module '", name, "' (", module.name(),
             ") has parameters on the meta device, and nothing says how to initialise them; "
             "derive it from fsdp::ParameterInit");
}

}  // namespace fsdp
