// Our language models as a program, for those who compare them with other people's.
//
//   model_run config FILE
//       reads a config.json and writes ours to the standard output
//   model_run compute HUGGINGFACE_DIRECTORY RANKS OUT_DIRECTORY
//       loads the weights into a model that is sharded over so many thread ranks, computes logits,
//       loss and gradients of tokens 0, 1, 2, ... and writes them as safetensors, gradients under
//       the names of the published tensors
#include <ATen/ATen.h>

#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "fsdp/base/error.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/piece_writer.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/config_json.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"

namespace fsdp {
namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  FSDP_CHECK(file.good(), "'", path, "' cannot be read");
  return text.str();
}

using Tensors = std::map<std::string, at::Tensor>;

void write(const Tensors& tensors, const std::string& directory) {
  std::vector<Piece> pieces;
  for (const auto& [name, value] : tensors) {
    const std::vector<int64_t> shape = value.sizes().vec();
    pieces.push_back({.name = name,
                      .dtype = DType::kFloat32,
                      .box = {std::vector<int64_t>(shape.size(), 0), shape},
                      .read = [value = value.contiguous()](FlatRange range, std::byte* into) {
                        std::memcpy(into, value.const_data_ptr<float>() + range.begin,
                                    static_cast<size_t>(range.numel()) * sizeof(float));
                      }});
  }
  write_pieces(directory, "computed", 0, pieces, {});
}

NameRules stored_names(const LanguageModel& model) {
  std::vector<NameRule> rules;
  for (const StoredName& name : model.stored_names())
    rules.push_back({.title = name.stored, .pattern = name.in_tree, .sections = {{name.stored}}});
  return NameRules(std::move(rules));
}

std::string stored_name(const LanguageModel& model, const std::string& name) {
  for (const StoredName& renamed : model.stored_names())
    if (renamed.in_tree == name) return renamed.stored;
  return name;
}

Tensors compute(const std::string& directory, int ranks) {
  Tensors results;
  std::mutex mutex;
  const ModelConfig config =
      parse_model_config(text_of(directory + "/config.json"), directory + "/config.json");
  run_threads(ranks, {}, [&](World& world) {
    const std::shared_ptr<LanguageModel> model = [&] {
      const MetaConstruction without_memory;
      return build_language_model(config);
    }();
    const Mesh mesh = world.mesh();
    const Sharded sharded = fully_shard(model, mesh, {});
    load_checkpoint(directory, {.sharded = sharded}, {.names = stored_names(*model)});

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
      at::Tensor& whole = results["gradient." + stored_name(*model, each.name)];
      if (!whole.defined()) whole = at::full(each.shape, NAN);
      whole.view({-1}).narrow(0, each.begin, each.gradient.numel()).copy_(each.gradient);
    }
    results["logits"] = logits;
    results["loss"] = loss.total.detach().view({1});
    for (const LossTerm& term : loss.terms) results["loss." + term.name] = term.value.view({1});
  });
  return results;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() == 2 && arguments[0] == "config") {
    std::cout << config_json(parse_model_config(text_of(arguments[1]), arguments[1]));
    return 0;
  }
  if (arguments.size() == 4 && arguments[0] == "compute") {
    write(compute(arguments[1], std::stoi(arguments[2])), arguments[3]);
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
