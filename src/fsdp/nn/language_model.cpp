#include "fsdp/nn/language_model.h"

#include "fsdp/nn/hybrid.h"
#include "fsdp/nn/layers/expert_loads.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/llama.h"

namespace fsdp {

namespace {

std::shared_ptr<LanguageModel> make(const ModelConfig& config, const BuildOptions& options) {
  const auto* hybrid = std::get_if<NemotronHConfig>(&config);
  return hybrid != nullptr ? nn::make_hybrid(*hybrid, options) : nn::make_llama(config, options);
}

}  // namespace

std::shared_ptr<LanguageModel> build_language_model(const ModelConfig& config,
                                                    const BuildOptions& options) {
  check_trainable(config);
  std::shared_ptr<LanguageModel> model = make(config, options);
  nn::initialize_by_name(*model, options.seed);
  // Buffers stay as they are: a router's biases change by less than a narrow type could tell.
  if (options.dtype != at::kFloat)
    for (at::Tensor& parameter : model->parameters())
      parameter.set_data(parameter.to(options.dtype));
  return model;
}

void LanguageModel::end_step(const Mesh& mesh) { nn::even_out_loads(*this, mesh); }

}  // namespace fsdp
