// First values of parameters as a function of seed, name and element alone: the same on every rank
// and every device, with or without the meta device.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/shard/parameter_init.h"

namespace fsdp::nn {

// A module with its own parameters derives from this and sets all of them in reset_parameters(),
// with the functions below. Its constructor leaves their values undefined.
class NamedInit : public ParameterInit {
 public:
  // `path` is the module's place in the tree, "model.layers.0.mlp".
  void set_origin(uint64_t seed, std::string path);

 protected:
  // Normal numbers around 0. `name` is the parameter's, "weight".
  void fill_normal(const at::Tensor& parameter, std::string_view name,
                   double standard_deviation) const;
  // Uniform numbers from -bound to bound.
  void fill_uniform(const at::Tensor& parameter, std::string_view name, double bound) const;

 private:
  uint64_t key_of(std::string_view name) const;

  uint64_t seed_ = 0;
  std::string path_;
};

// Gives every module of the tree its origin and, if it has memory, its first values.
void initialize_by_name(torch::nn::Module& model, uint64_t seed);

}  // namespace fsdp::nn
