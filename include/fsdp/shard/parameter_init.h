// Gives parameters that were constructed on the meta device their first values.
#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <string>

namespace fsdp {

// Implement this in your own modules with parameters or buffers, if models are to be built on the
// meta device: set all of them, as the constructor does. libtorch's layers need nothing.
class ParameterInit {
 public:
  virtual ~ParameterInit() = default;
  virtual void reset_parameters() = 0;
};

// Calls the module's reset_parameters(). Error if it has none that is known; `name` is its path.
void initialize_parameters(torch::nn::Module& module, const std::string& name);

// While one of these lives, tensors that the calling thread makes without naming a device are on
// the meta device: they have a shape and no memory. For building models of any size:
//
//   auto model = [] { fsdp::MetaConstruction meta; return Net(options); }();
//   auto sharded = fsdp::fully_shard(model, mesh);   // gives them values, one module at a time
class MetaConstruction {
 public:
  MetaConstruction();
  ~MetaConstruction();
  MetaConstruction(const MetaConstruction&) = delete;
  MetaConstruction& operator=(const MetaConstruction&) = delete;

 private:
  const bool was_on_;
};

}  // namespace fsdp
