// The kinds of work that a table of rates has: what is called, and for which sizes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/train/calibration/call_timer.h"

namespace fsdp::train {

// Sizes to measure at. A forecast is best at them, and interpolates between them.
struct WorkSizes {
  std::vector<int64_t> tokens;
  std::vector<int64_t> widths;           // of matrices: inputs, and outputs up to head_width
  int64_t head_width = 0;                // a vocabulary
  std::vector<int64_t> code_tokens;      // the same for products of fp8 codes
  std::vector<int64_t> code_widths;      // none: the device has no such products
  std::vector<int64_t> elements;         // of passes over memory
  std::vector<int64_t> update_elements;  // of updates
  std::vector<int64_t> attention_rows;   // sequences times heads
  std::vector<int64_t> sequences;
  std::vector<int64_t> head_dims;
};

struct MeasuredWork {
  std::string name;
  std::vector<std::string> axes;
  std::vector<std::vector<int64_t>> points;
  // The call for sizes of the axes; it holds its tensors.
  std::function<std::function<void()>(std::span<const int64_t> sizes)> prepare;
  TimedBy timed_by = TimedBy::kReplay;
};

struct WorkPlace {
  c10::Device device = c10::kCPU;
  at::ScalarType dtype = at::kFloat;  // that models compute in there
};

// X [tokens, in], W [out, in]: X W^T; G [tokens, out]: G W; G^T X, in fp32 where a device has that.
// Names: "product TYPE forward", "... input gradient", "... weight gradient"; codes likewise with
// the name of their recipe, without the passes that make the codes.
std::vector<MeasuredWork> product_works(const WorkPlace& place, const WorkSizes& sizes);

// "attention TYPE forward" and "... backward", by rows, sequence, head_dim and queries per key.
std::vector<MeasuredWork> attention_works(const WorkPlace& place, const WorkSizes& sizes);

// The layers' parts that read and write memory, by elements: "norm forward", ...
std::vector<MeasuredWork> pass_works(const WorkPlace& place, const WorkSizes& sizes);

// Updates by elements: "update split", ...; the host's, "host update ...", with its `threads`.
std::vector<MeasuredWork> update_works(const WorkPlace& place, const WorkSizes& sizes,
                                       int64_t threads);

// Between host and device, by bytes: "copy to host", "copy to device".
std::vector<MeasuredWork> bus_works(const WorkPlace& place, const WorkSizes& sizes);

// Numbers like those of a model, and tokens. Not random ones: a recording that fails leaves a GPU's
// generator in a state that no later call can use.
at::Tensor some_numbers(at::IntArrayRef shape, const WorkPlace& place);
at::Tensor some_tokens(int64_t count, int64_t vocabulary, const WorkPlace& place);

}  // namespace fsdp::train
