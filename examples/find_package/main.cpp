// Uses the installed library from outside: a model's plan, the world this process was started in,
// and a collective on libtorch tensors. Start it alone, or with mpirun -n 2.
#include <iostream>

#include <ATen/ATen.h>
#include <fsdp/fsdp.h>
#include <fsdp/plan/load_model.h>

int main() {
  const fsdp::ModelShape model = fsdp::model_by_name("llama-110m");
  const fsdp::Strategy strategy = fsdp::Strategy::optim_grads_params;

  fsdp::World world = fsdp::World::from_environment();
  const at::Tensor sum = at::full({4}, world.rank() + 1.0);
  world.communicator().all_reduce(sum, {}, "example sum").wait();

  if (world.rank() == 0) {
    std::cout << model.name << ": " << model.parameters() << " parameters in " << model.units.size()
              << " units, strategy " << fsdp::to_text(strategy) << "\n"
              << "ranks: " << world.size()
              << ", the sum of (rank + 1) over them: " << sum[0].item<float>() << "\n";
  }
  return 0;
}
