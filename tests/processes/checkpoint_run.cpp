// Programs that other programs look at: a checkpoint beside what was in memory, and a training that
// can be killed at any time.
//
//   checkpoint_run write DIRECTORY
//       trains on 3 thread ranks, saves to DIRECTORY/run, and writes what the ranks have in memory
//       to DIRECTORY/memory, whole
//   checkpoint_run train DIRECTORY LAST_STEP SAVE_EVERY [STRATEGY]
//       goes on from the latest checkpoint in DIRECTORY to LAST_STEP, saving in the background; the
//       ranks are processes (mpirun). SAVE_EVERY 0: once, in the end
#include <iostream>
#include <string>

#include "support/checkpoint_training.h"
#include "support/whole_tensors.h"

namespace fsdp::testing {
namespace {

int write_beside_memory(const std::string& directory) {
  Training run{.ranks = 3};
  run.shard.strategy = parse_strategy("optim_grads_params");
  run.compute = at::kBFloat16;  // split main weights: the hardest ones to put together
  const WholeState state = run_training(run, [&](TrainingRank& rank) {
    rank.train(0, 3);
    save_checkpoint(directory + "/run", rank.state(), {.step = 3});
  });
  // Made of what ranks say they have, and not by the way checkpoints go.
  write_whole_tensors(state, directory, "memory");
  return 0;
}

int train_until(const std::string& directory, int64_t last_step, int64_t save_every,
                const std::string& strategy) {
  World world = World::from_environment();
  const Mesh mesh = world.mesh({});
  Wide model = make_wide();
  const Sharded sharded = fully_shard(model, mesh, {.strategy = parse_strategy(strategy)});
  AdamW optimizer(sharded, {.lr = 1e-3});
  Checkpointer checkpointer(directory, mesh, {.keep = {.keep_last = 2}});
  const CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
  int64_t step = 0;
  int64_t position = 0;  // in the data
  torch::manual_seed(11 + static_cast<uint64_t>(world.rank()));
  if (const auto loaded = checkpointer.load_latest(state)) {
    step = loaded->step;
    position = std::stoll(loaded->data);
  }
  while (step < last_step) {
    // Samples in an order that depends on all before it, and random numbers: both must go on.
    position = (position * 31 + 7 + world.rank()) % 1009;
    const at::Tensor sample =
        input_for(0, static_cast<int>(position), {2, 19}) + 0.1 * at::randn({2, 19});
    model(sample).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    ++step;
    const bool is_last = step == last_step;
    if (is_last || (save_every > 0 && step % save_every == 0))
      checkpointer.save(state, {.step = step, .data = std::to_string(position)});
    if (step == 1 && world.rank() == 0) std::cout << "training" << std::endl;
  }
  checkpointer.wait();
  if (world.rank() == 0) std::cout << "done" << std::endl;
  return 0;
}

}  // namespace
}  // namespace fsdp::testing

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (arguments.size() == 2 && arguments[0] == "write")
      return fsdp::testing::write_beside_memory(arguments[1]);
    if ((arguments.size() == 4 || arguments.size() == 5) && arguments[0] == "train")
      return fsdp::testing::train_until(
          arguments[1], std::stoll(arguments[2]), std::stoll(arguments[3]),
          arguments.size() == 5 ? arguments[4] : "optim_grads_params");
    std::cerr << "usage: checkpoint_run write DIRECTORY | train DIRECTORY LAST_STEP SAVE_EVERY "
                 "[STRATEGY]\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
