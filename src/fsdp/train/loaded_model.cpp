#include "fsdp/train/loaded_model.h"

#include <ATen/ATen.h>

#include <optional>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/tensor_catalog.h"
#include "fsdp/data/data_position.h"
#include "fsdp/nn/config_json.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/run_options.h"
#include "fsdp/train/run_plan.h"
#include "fsdp/train/same_model.h"
#include "fsdp/train/settings.h"
#include "fsdp/train/stored_names.h"

namespace fsdp::train {

namespace {

ModelConfig config_of(const InferenceOptions& options, const std::string& path) {
  if (!options.model.empty()) {
    const ModelConfig model = find_model(options.model).config;
    check_same_model(path, model, ModelAspect::kTensors, "leave --model out");
    return model;
  }
  const std::optional<std::string> text = TensorCatalog(path).model_config();
  if (!text)
    throw UsageError(concat(path,
                            " has no config.json, so the model is not known; name it with "
                            "--model"));
  return parse_model_config(*text, concat(path, "/config.json"));
}

// What the run noted of its data; programs of one's own may note something else.
int64_t sequence_of(const LoadedCheckpoint& loaded) {
  if (loaded.data_of_ranks.empty()) return 0;
  try {
    return parse_data_position(loaded.data_of_ranks.front(), loaded.path).sequence;
  } catch (const UsageError&) {
    return 0;
  }
}

}  // namespace

LoadedModel load_for_inference(const InferenceOptions& options, const Mesh& mesh) {
  TrainOptions given;
  apply_given(given, {{"device", {options.device}}, {"compute", {options.compute}}});
  if (given.compute && element_bytes(*given.compute) < 2)
    throw UsageError(concat("--compute is ", name_of(*given.compute),
                            "; models compute in fp64, fp32, bf16 or fp16"));
  const c10::Device device = training_device(given, mesh.inner().rank());
  const DType compute = compute_dtype(given, device);
  const std::string slow = slow_compute_text(compute, device, this_cpu());
  if (mesh.inner().rank() == 0 && !slow.empty()) log(LogLevel::kWarning, slow);
  const std::string path = checkpoint_or_files(options.path);
  std::shared_ptr<LanguageModel> model;
  {
    const MetaConstruction meta;
    model = build_language_model(config_of(options, path), {.dtype = scalar_type_of(compute)});
  }
  // Frozen: neither gradients nor main weights need memory.
  for (at::Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
  const Sharded sharded =
      fully_shard(std::static_pointer_cast<torch::nn::Module>(model), mesh, {.device = device});
  LoadOptions loading;
  loading.names = stored_name_rules(*model);
  loading.is_tolerance_offered = false;
  const LoadedCheckpoint loaded = load_checkpoint(path, {.sharded = sharded}, loading);
  return {model, sharded, device, path, loaded.step, sequence_of(loaded)};
}

}  // namespace fsdp::train
