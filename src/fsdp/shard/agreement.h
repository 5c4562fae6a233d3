// The facts that ranks must agree on before sharding: options, parameters, first values.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/comm/rank_facts.h"
#include "fsdp/shard/module_units.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// The options, by the names of their fields, then every parameter in the order of the shards'
// layout. `device` is the device of the buffers.
RankFacts shard_facts(const ShardOptions& options, c10::Device device, const ModuleUnits& found);

// Every rank keeps its own part of a value. If ranks built different values, the model would be a
// patchwork of them, and nothing would ever report it.
class ValueAgreement {
 public:
  ValueAgreement(const Mesh& mesh, InitialValues from) : mesh_(mesh), from_(from) {}

  // Whether this rank's values are used, so that it must make them.
  bool are_made_here() const;

  // All ranks call these with the same parameters in the same order.
  // Remembers a value for check_agreement(), if all ranks must have the same.
  void note(const at::Tensor& value, const std::string& name);
  // The value to use.
  at::Tensor agreed(const at::Tensor& value, const std::string& name) const;

  // Throws an Error that names the first parameter noted since the last call whose values differ
  // between ranks.
  void check_agreement();

 private:
  const Mesh& mesh_;
  const InitialValues from_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> checksums_;
};

}  // namespace fsdp
