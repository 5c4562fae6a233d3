#include "fsdp/nn/language_model.h"

#include "fsdp/nn/hybrid.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/llama.h"

namespace fsdp {

namespace {

std::shared_ptr<LanguageModel> make(const ModelConfig& config, const BuildOptions& options) {
  const auto* hybrid = std::get_if<NemotronHConfig>(&config);
  return hybrid != nullptr ? nn::make_hybrid(*hybrid, options.recompute)
                           : nn::make_llama(config, options);
}

}  // namespace

std::shared_ptr<LanguageModel> build_language_model(const ModelConfig& config,
                                                    const BuildOptions& options) {
  check_trainable(config);
  std::shared_ptr<LanguageModel> model = make(config, options);
  nn::initialize_by_name(*model, options.seed);
  if (options.dtype != at::kFloat) model->to(options.dtype);
  return model;
}

}  // namespace fsdp
