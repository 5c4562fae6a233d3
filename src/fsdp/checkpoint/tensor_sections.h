// The sections a model tensor is stored as, and which part of each one a piece of the tensor is.
//
// A model may fuse what others keep apart, for example the gate and the up projection of a gated
// MLP as one matrix. Stored apart, under names of their own, both can be loaded by either model:
//
//   model: linear_fc1.weight [4, 3]        stored: two sections [2, 3], at offsets [0, 0] and [2,
//   0]
//
//     a a a                                  a a a   linear_fc1.weight_w
//     a a B  <- a rank's piece begins        a a B
//     B B B  <- and ends here                B B B   linear_fc1.weight_v
//     c c c                                  c c c
//
// Moments have the sections of their parameter; their names are the section's plus ".exp_avg", ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/layout/box.h"

namespace fsdp {

struct TensorSection {
  std::string name;              // it is stored under
  std::vector<int64_t> shape;    // it is stored with
  std::vector<int64_t> offsets;  // of its first element in the model tensor, one per dim

  friend bool operator==(const TensorSection&, const TensorSection&) = default;
};

// What a box of the model tensor and one section share, in the coordinates of each.
struct SectionBox {
  size_t section = 0;  // its position in the list
  Box stored;
  Box model;

  friend bool operator==(const SectionBox&, const SectionBox&) = default;
};

// The parts of a box of the model tensor, in the order of the sections: together exactly the box.
// Sections that share nothing with it are left out. A part of a contiguous box is contiguous in the
// model tensor only where sections are cut along dim 0.
std::vector<SectionBox> cut_at_sections(std::span<const TensorSection> sections,
                                        const Box& model_box);

}  // namespace fsdp
