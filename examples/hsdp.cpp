// Four ranks as a 2 x 2 mesh: the same training as FSDP over all of them, as HSDP and as HFSDP.
//
//   hsdp                          four ranks as threads of this process
//   mpirun -n 4 hsdp              four processes; neighbouring ranks (one host) are an inner group
#include <fsdp/fsdp.h>
#include <fsdp/nn.h>

#include <cstdio>
#include <exception>

struct Way {
  const char* name;
  int outer;
  fsdp::Strategy strategy;
};

const Way kWays[] = {
    {"FSDP, 1 x 4", 1, fsdp::Strategy::optim_grads_params},
    // Each row holds a whole sharded copy: gathers stay within a row, gradients cross rows once per
    // step.
    {"HSDP, 2 x 2", 2, fsdp::Strategy::optim_grads_params},
    // The same, but the optimizer's state is cut over all four: HSDP's traffic, FSDP's moments.
    {"HFSDP, 2 x 2", 2, fsdp::Strategy::optim_grads_params.hfsdp()},
};

void train(fsdp::World& world, const Way& way) {
  const fsdp::Mesh mesh = world.mesh({.outer = way.outer});
  const std::shared_ptr<fsdp::LanguageModel> model = [] {
    const fsdp::MetaConstruction without_memory;  // no rank ever holds the whole model
    return fsdp::build_language_model(fsdp::find_preset("tiny")->config, {.seed = 1});
  }();
  const fsdp::Sharded sharded = fsdp::fully_shard(model, mesh, {.strategy = way.strategy});
  fsdp::AdamW optimizer(sharded, {.lr = 1e-3, .step = {.max_norm = 1.0}});

  const torch::Tensor mean = torch::empty({1}, torch::kDouble);
  for (int64_t step = 0; step < 5; ++step) {
    const torch::Tensor tokens =
        (torch::arange(33) * (world.rank() + 3) + step).remainder(257).unsqueeze(0);
    const fsdp::ModelLoss loss = model->loss(tokens.slice(1, 0, 32), tokens.slice(1, 1, 33));
    loss.total.backward();
    optimizer.step();
    optimizer.zero_grad();
    mean[0] = loss.total.item<double>();
  }
  world.communicator().all_reduce(mean, {.op = fsdp::ReduceOp::kAvg}, "loss").wait();
  if (world.rank() == 0)
    std::printf("%s\n%s  loss after 5 steps %.5f\n", way.name, sharded.memory().text().c_str(),
                mean.item<double>());
}

int main() try {
  const auto train_all = [](fsdp::World& world) {
    for (const Way& way : kWays) train(world, way);
  };
  if (fsdp::read_launch().size > 1) {
    fsdp::World world = fsdp::World::from_environment();
    train_all(world);
  } else {
    fsdp::run_threads(4, fsdp::CommOptions::from_environment(), train_all);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "hsdp: %s\n", error.what());
  return 1;
}
