// The Gated DeltaNet mixer as a program, for those who compare it with other people's.
//
//   delta_net_run DIRECTORY RANKS CHUNK_SIZE OUT_DIRECTORY
//       DIRECTORY has a config.json with Qwen3-Next's names of sizes, and the layer's weights,
//       called linear_attn.*, as safetensors. Shards the layer over so many thread ranks, and
//       writes its output for waves(0.5) and the gradients of the sum of its products with
//       waves(0.3)
#include <ATen/ATen.h>

#include <cmath>
#include <iostream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/layers/gated_delta_net.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/shard/unit.h"
#include "support/layer_gradients.h"
#include "support/whole_tensors.h"

namespace fsdp {
namespace {

constexpr int64_t kMaxConfigBytes = 1 << 20;

nn::GatedDeltaNetOptions read_options(const std::string& path) {
  const nlohmann::json config = nlohmann::json::parse(read_text_file(path, kMaxConfigBytes));
  return {.hidden_size = config.at("hidden_size"),
          .num_key_heads = config.at("linear_num_key_heads"),
          .num_value_heads = config.at("linear_num_value_heads"),
          .key_head_dim = config.at("linear_key_head_dim"),
          .value_head_dim = config.at("linear_value_head_dim"),
          .conv_kernel = config.at("linear_conv_kernel_dim"),
          .norm_eps = config.at("rms_norm_eps")};
}

// A model of this one layer.
struct OneLayer : torch::nn::Module {
  explicit OneLayer(const nn::GatedDeltaNetOptions& options)
      : linear_attn(register_module("linear_attn", Unit<nn::GatedDeltaNet>(options))) {}
  Unit<nn::GatedDeltaNet> linear_attn;
};

using Tensors = std::map<std::string, at::Tensor>;

Tensors compute(const std::string& directory, int ranks, int64_t chunk_size) {
  Tensors results;
  std::mutex mutex;
  nn::GatedDeltaNetOptions options = read_options(directory + "/config.json");
  options.chunk_size = chunk_size;
  run_threads(ranks, {}, [&](World& world) {
    const std::shared_ptr<OneLayer> model = [&] {
      const MetaConstruction without_memory;
      return std::make_shared<OneLayer>(options);
    }();
    const Mesh mesh = world.mesh();
    const Sharded sharded = fully_shard(model, mesh, {});
    load_checkpoint(directory, {.sharded = sharded});

    const at::Tensor x = testing::waves({2, 37, options.hidden_size}, 0.5).set_requires_grad(true);
    const at::Tensor output = model->linear_attn(x);
    (output * testing::waves(output.sizes(), 0.3)).sum().backward();

    const std::lock_guard lock(mutex);
    for (const ShardedParameter& each : sharded.parameters()) {
      at::Tensor& whole = results["gradient." + each.name];
      if (!whole.defined()) whole = at::full(each.shape, NAN);
      whole.view({-1}).narrow(0, each.begin, each.gradient.numel()).copy_(each.gradient);
    }
    results["output"] = output.detach();
    results["gradient.x"] = x.grad();
  });
  return results;
}

}  // namespace
}  // namespace fsdp

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() != 4) {
    std::cerr << "usage: see the head of delta_net_run.cpp\n";
    return 2;
  }
  try {
    fsdp::testing::write_whole_tensors(
        fsdp::compute(arguments[0], std::stoi(arguments[1]), std::stoll(arguments[2])),
        arguments[3], "computed");
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "delta_net_run: " << error.what() << "\n";
    return 1;
  }
}
