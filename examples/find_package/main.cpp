// Uses the installed library from outside: the models it knows, who started us, and libtorch.
#include <iostream>

#include <ATen/ATen.h>
#include <fsdp/comm/launch.h>
#include <fsdp/layout/strategy.h>
#include <fsdp/plan/model_catalog.h>

int main() {
  const fsdp::ModelShape model = fsdp::model_by_name("llama-110m");
  const fsdp::Strategy strategy = fsdp::parse_strategy("optim_grads_params");
  const fsdp::Launch launch = fsdp::read_launch();
  std::cout << model.name << ": " << model.parameters() << " parameters in " << model.units.size()
            << " units, strategy " << fsdp::to_text(strategy) << "\n"
            << "rank " << launch.rank << " of " << launch.size << ", started by "
            << fsdp::name_of(launch.launcher) << "\n"
            << "libtorch says 0 + 1 + 2 + 3 = " << at::arange(4).sum().item<int64_t>() << "\n";
  return 0;
}
