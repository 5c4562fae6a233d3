// Modules whose weights an optimizer of matrices updates whole (Muon).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

// A module derives from it if its own parameters (not its children's) are matrices of a hidden
// layer: ShardOptions::matrices then gives each matrix one owner.
class MatrixModule {
 public:
  virtual ~MatrixModule() = default;

  // The rows of the matrices that a parameter consists of, from the top, again and again until the
  // parameter ends: several where projections are fused or experts lie one below the other. Empty:
  // it is none, such as a bias.
  virtual std::vector<int64_t> matrix_rows(const std::string& parameter) const = 0;
};

}  // namespace fsdp
