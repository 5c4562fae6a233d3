// Whole tensors in one safetensors file, for programs of other people to compare with.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/safetensors_file.h"

namespace fsdp::testing {

// fp32, in DIRECTORY/FOLDER.
inline void write_whole_tensors(const std::map<std::string, at::Tensor>& tensors,
                                const std::string& directory, const std::string& folder) {
  std::vector<Piece> pieces;
  for (const auto& [name, value] : tensors) {
    const std::vector<int64_t> shape = value.sizes().vec();
    pieces.push_back({.name = name,
                      .dtype = DType::kFloat32,
                      .box = {std::vector<int64_t>(shape.size(), 0), shape},
                      .read = [value = value.contiguous()](FlatRange range, std::byte* into) {
                        std::memcpy(into, value.const_data_ptr<float>() + range.begin,
                                    static_cast<size_t>(range.numel()) * sizeof(float));
                      }});
  }
  write_pieces(directory, 0, {{folder, pieces}}, {});
}

}  // namespace fsdp::testing
