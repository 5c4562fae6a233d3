// Trains a small model, sharded: copy this file and put your own model in.
//
//   hello_fsdp                    one rank
//   hello_fsdp 3                  three ranks as threads of this process
//   mpirun -n 3 hello_fsdp        three ranks as processes
#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/fsdp.h>
#include <fsdp/nn.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <cstdlib>

// An ordinary module ...
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : up(register_module("up", fsdp::nn::Linear(width, 4 * width))),
        down(register_module("down", fsdp::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(x))); }
  fsdp::nn::Linear up, down;
};
TORCH_MODULE(Block);

// ... becomes a unit where it is called: its weights are whole around that call, and only then.
struct NetImpl : torch::nn::Module {
  NetImpl(int64_t vocabulary, int64_t width) {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), fsdp::Unit<Block>(width)));
    embedding = register_module("embedding", fsdp::Unit<torch::nn::Embedding>(vocabulary, width));
    head = register_module("head", fsdp::Unit<fsdp::nn::Linear>(width, vocabulary));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = embedding(tokens);
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  fsdp::Unit<torch::nn::Embedding> embedding{nullptr};
  std::vector<fsdp::Unit<Block>> blocks;
  fsdp::Unit<fsdp::nn::Linear> head{nullptr};
};
TORCH_MODULE(Net);

void train(fsdp::World& world) {
  constexpr int64_t kVocabulary = 97;
  const fsdp::Mesh mesh = world.mesh();
  Net model(kVocabulary, 64);
  const fsdp::Sharded sharded =
      fsdp::fully_shard(model, mesh, {.initial_values = fsdp::InitialValues::kOfRankZero});
  fsdp::AdamW optimizer(sharded, {.lr = 3e-3, .step = {.max_norm = 1.0}});
  if (world.rank() == 0) std::printf("memory of each rank\n%s", sharded.memory().text().c_str());

  torch::Generator data = at::detail::createCPUGenerator(100 + static_cast<uint64_t>(world.rank()));
  for (int step = 0; step < 20; ++step) {
    const torch::Tensor tokens = torch::randint(kVocabulary, {16, 32}, data, torch::kLong);
    const torch::Tensor next = (tokens * 3 + 1) % kVocabulary;  // what there is to learn
    const torch::Tensor logits = model(tokens).flatten(0, 1);
    torch::Tensor loss = torch::cross_entropy_loss(logits, next.flatten());
    loss.backward();
    optimizer.step();  // runs beside the next forward
    optimizer.zero_grad();
    if (world.rank() == 0 && step % 5 == 4)
      std::printf("step %2d  loss %.3f\n", step + 1, loss.item<float>());
  }
}

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 0;
  if (ranks > 1) {
    fsdp::run_threads(ranks, fsdp::CommOptions::from_environment(), train);
  } else {
    fsdp::World world = fsdp::World::from_environment();
    train(world);
  }
}
