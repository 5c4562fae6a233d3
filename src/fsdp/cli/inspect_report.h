// The results of `fsdp inspect`, as tables for people and as JSON for programs.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/tools/tensor_numbers.h"
#include "fsdp/checkpoint/tools/verify_files.h"

namespace fsdp::cli {

// A tensor that was asked for.
struct InspectedTensor {
  const CatalogTensor* tensor = nullptr;
  std::optional<TensorStatistics> statistics = std::nullopt;
};

nlohmann::ordered_json to_json(const TensorCatalog& catalog, std::span<const int64_t> steps);
nlohmann::ordered_json to_json(std::span<const InspectedTensor> tensors);
nlohmann::ordered_json to_json(const Verification& verification);
nlohmann::ordered_json to_json(std::span<const TensorDifference> differences);

// `steps` are those of the run whose latest checkpoint this is; empty: the user named it directly.
void print_summary(std::ostream& out, const TensorCatalog& catalog, std::span<const int64_t> steps);
void print_tensors(std::ostream& out, std::span<const InspectedTensor> tensors);
void print_verification(std::ostream& out, const Verification& verification);
// The first `most` of each kind.
void print_differences(std::ostream& out, std::span<const TensorDifference> differences,
                       size_t most);

}  // namespace fsdp::cli
