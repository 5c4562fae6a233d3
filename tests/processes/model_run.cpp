// Our language models as a program, for those who compare them with other people's.
//
//   model_run config FILE
//       reads a config.json and writes ours to the standard output
//   model_run compute HUGGINGFACE_DIRECTORY RANKS OUT_DIRECTORY
//       loads the weights into a model that is sharded over so many thread ranks, computes logits,
//       loss and gradients of tokens 0, 1, 2, ... and writes them as safetensors, gradients under
//       the names of the published tensors
#include <ATen/ATen.h>

#include <iostream>
#include <map>
#include <mutex>
#include <string>

#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/model/trained_model.h"
#include "support/small_models.h"
#include "support/whole_tensors.h"

namespace fsdp {
namespace {

constexpr int64_t kMaxConfigBytes = 1 << 20;

ModelConfig read_config(const std::string& path) {
  return parse_model_config(read_text_file(path, kMaxConfigBytes), path);
}

using Tensors = std::map<std::string, at::Tensor>;

Tensors compute(const std::string& directory, int ranks) {
  Tensors results;
  Tensors gradients;
  std::mutex mutex;
  const ModelConfig config = read_config(directory + "/config.json");
  run_threads(ranks, {}, [&](World& world) {
    const std::shared_ptr<LanguageModel> model = [&] {
      const MetaConstruction without_memory;
      return build_language_model(config);
    }();
    const Mesh mesh = world.mesh();
    const Sharded sharded = fully_shard(model, mesh, {});
    load_checkpoint(directory, {.sharded = sharded, .buffers = train::stored_buffers(*model)},
                    {.names = train::stored_name_rules(*model)});

    const at::Tensor tokens =
        at::arange(40, at::kLong).remainder(vocab_size_of(config)).view({2, 20});
    const at::Tensor targets = at::constant_pad_nd(tokens.narrow(1, 1, 19), {0, 1}, -100);
    const at::Tensor logits = [&] {
      const at::NoGradGuard no_grad;
      return model->logits(tokens);
    }();
    const ModelLoss loss = model->loss(tokens, targets);
    loss.total.backward();

    const std::lock_guard lock(mutex);
    for (const ShardedParameter& each : sharded.parameters()) {
      at::Tensor& whole = gradients[each.name];
      if (!whole.defined()) whole = at::full(each.shape, NAN);
      whole.view({-1}).narrow(0, each.begin, each.gradient.numel()).copy_(each.gradient);
    }
    for (const auto& [name, gradient] : gradients)
      for (const auto& [stored, part] : testing::stored_tensors(*model, name, gradient))
        results["gradient." + stored] = part;
    results["logits"] = logits;
    results["loss"] = loss.total.detach().view({1});
    for (const LossTerm& term : loss.terms) results["loss." + term.name] = term.value.view({1});
  });
  return results;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() == 2 && arguments[0] == "config") {
    std::cout << config_json(read_config(arguments[1]));
    return 0;
  }
  if (arguments.size() == 4 && arguments[0] == "compute") {
    testing::write_whole_tensors(compute(arguments[1], std::stoi(arguments[2])), arguments[3],
                                 "computed");
    return 0;
  }
  std::cerr << "usage: see the head of model_run.cpp\n";
  return 2;
}

}  // namespace
}  // namespace fsdp

int main(int argc, char** argv) {
  try {
    return fsdp::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::cerr << "model_run: " << error.what() << "\n";
    return 1;
  }
}
