#include "fsdp/nn/language_model.h"

#include "fsdp/base/error.h"
#include "fsdp/nn/llama.h"
#include "fsdp/nn/named_init.h"

namespace fsdp {

namespace {

std::shared_ptr<LanguageModel> make(const ModelConfig& config, Recompute recompute) {
  if (std::holds_alternative<NemotronHConfig>(config)) throw UsageError("hybrid: not yet");
  return nn::make_llama(config, recompute);
}

}  // namespace

std::shared_ptr<LanguageModel> build_language_model(const ModelConfig& config,
                                                    const BuildOptions& options) {
  check_trainable(config);
  std::shared_ptr<LanguageModel> model = make(config, options.recompute);
  nn::initialize_by_name(*model, options.seed);
  if (options.dtype != at::kFloat) model->to(options.dtype);
  return model;
}

}  // namespace fsdp
