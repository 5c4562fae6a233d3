// A module of your own, trained sharded, saved and resumed: start it twice, on any ranks.
//
//   own_module RUN 40             40 steps on one rank; checkpoints in the directory RUN
//   own_module RUN 80 3           goes on after step 40, on three ranks (threads of this process)
//   mpirun -n 2 own_module RUN 99
#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/fsdp.h>
#include <fsdp/nn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>

// A layer with parameters of its own. ParameterInit is what fsdp::MetaConstruction asks for.
struct WavesImpl : torch::nn::Module, fsdp::ParameterInit {
  WavesImpl(int64_t inputs, int64_t outputs)
      : frequency(register_parameter("frequency", torch::empty({inputs, outputs}))),
        phase(register_parameter("phase", torch::empty({outputs}))) {
    reset_parameters();
  }
  void reset_parameters() override {
    const torch::NoGradGuard no_grad;
    frequency.normal_();
    phase.uniform_(0, 2 * M_PI);
  }
  torch::Tensor forward(torch::Tensor x) { return torch::sin(x.mm(frequency) + phase); }
  torch::Tensor frequency, phase;
};
TORCH_MODULE(Waves);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : up(register_module("up", fsdp::nn::Linear(width, 2 * width))),
        down(register_module("down", fsdp::nn::Linear(2 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::silu(up(x))); }
  fsdp::nn::Linear up, down;
};
TORCH_MODULE(Block);

// A Unit is gathered as a whole before its call and released after it. The head is a unit, too, but
// declared without Unit<>, as a module has to be whose code is not yours: fully_shard() is told its
// name, and call_unit() calls it.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width) {
    waves = register_module("waves", fsdp::Unit<Waves>(2, width));
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), fsdp::Unit<Block>(width)));
    head = register_module("head", fsdp::nn::Linear(width, 1));
  }
  torch::Tensor forward(const torch::Tensor& points) {
    torch::Tensor x = waves(points);
    for (auto& block : blocks) x = block(x);
    return fsdp::call_unit(head, x);
  }
  fsdp::Unit<Waves> waves{nullptr};
  std::vector<fsdp::Unit<Block>> blocks;
  fsdp::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

// Ranks that are threads share torch's random numbers: one at a time, so that all begin alike.
Net make_model() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(1);
  return Net(48);
}

// The batch of a step depends on the step alone, and each rank takes its rows of it: then neither
// the number of ranks nor a resume changes what is learned.
torch::Tensor points_of(int64_t step, const fsdp::World& world) {
  constexpr int64_t kBatch = 240;
  torch::Generator random = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
  const torch::Tensor all = torch::rand({kBatch, 2}, random) * 2 - 1;
  return all.tensor_split(world.size())[static_cast<size_t>(world.rank())];
}

void train(fsdp::World& world, const char* directory, int64_t steps) {
  const fsdp::Mesh mesh = world.mesh();
  Net model = make_model();
  const fsdp::Sharded sharded = fsdp::fully_shard(model, mesh, {.units = {"head"}});
  fsdp::AdamW optimizer(sharded, {.lr = 2e-3, .step = {.max_norm = 1.0}});

  fsdp::Checkpointer checkpointer(directory, mesh, {.keep = {.keep_last = 2}});
  const fsdp::CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
  int64_t step = 0;
  if (const auto loaded = checkpointer.load_latest(state)) step = loaded->step;
  if (world.rank() == 0 && step > 0) std::printf("goes on after step %ld\n", long{step});

  while (step < steps) {
    const torch::Tensor points = points_of(++step, world);
    const torch::Tensor wanted = torch::sin(3 * points.sum(1)) * points.prod(1);
    const torch::Tensor loss = torch::mse_loss(model(points).flatten(), wanted);
    loss.backward();
    optimizer.step();  // runs beside what follows
    optimizer.zero_grad();
    if (step % 20 != 0 && step != steps) continue;
    const torch::Tensor mean = loss.detach().view({1});
    world.communicator().all_reduce(mean, {.op = fsdp::ReduceOp::kAvg}, "loss").wait();
    if (world.rank() == 0) std::printf("step %3ld  loss %.6f\n", long{step}, mean.item<float>());
    checkpointer.save(state, {.step = step});  // returns after a copy
  }
  checkpointer.wait();  // here errors of the last save are thrown
}

int main(int argc, char** argv) try {
  if (argc < 3) throw fsdp::UsageError("usage: own_module RUN STEPS [RANKS]");
  const auto body = [&](fsdp::World& world) { train(world, argv[1], std::atol(argv[2])); };
  const int ranks = argc > 3 ? std::atoi(argv[3]) : 0;
  if (ranks > 1) {
    fsdp::run_threads(ranks, fsdp::CommOptions::from_environment(), body);
  } else {
    fsdp::World world = fsdp::World::from_environment();
    body(world);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "own_module: %s\n", error.what());
  return 1;
}
