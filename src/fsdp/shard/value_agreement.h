// Makes sure that all ranks begin with the same parameter values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// Every rank keeps its own part of a value, so if ranks built different values the model would be a
// patchwork of them, and nothing would ever say so.
class ValueAgreement {
 public:
  ValueAgreement(const Mesh& mesh, InitialValues from) : mesh_(mesh), from_(from) {}

  // Whether this rank's values are used, and so must be made.
  bool are_made_here() const;

  // The value to use; all ranks call it with the same parameters in the same order.
  at::Tensor agree_on(const at::Tensor& value, const std::string& name);

  // An Error that names the first parameter whose values differ between ranks.
  void check_agreement() const;

 private:
  const Mesh& mesh_;
  const InitialValues from_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> checksums_;
};

}  // namespace fsdp
