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
  std::vector<int64_t> experts;
  std::vector<int64_t> expert_rows;    // of all experts
  std::vector<int64_t> expert_widths;  // of their matrices
};

struct MeasuredWork {
  std::string name;
  std::vector<std::string> axes;
  std::vector<std::vector<int64_t>> points;
  // The call for sizes of the axes; it holds its tensors.
  std::function<std::function<void()>(std::span<const int64_t> sizes)> prepare;
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

// The same that make codes of fp8, and "codes of weights RECIPE": those of a matrix after its
// update.
std::vector<MeasuredWork> code_works(const WorkPlace& place, const WorkSizes& sizes);

// Layers of experts, forward and backward: "grouped product TYPE ...", by rows, experts, out and
// in, evenly spread; "router ..." by tokens, experts and in; "dispatch ..." and "combine ..." by
// elements of all choices and by choices of a token.
std::vector<MeasuredWork> expert_works(const WorkPlace& place, const WorkSizes& sizes);

// Updates by elements: "update split", ...; a CPU's with so many threads.
std::vector<MeasuredWork> update_works(const WorkPlace& place, const WorkSizes& sizes,
                                       int64_t threads);

// A pass over so many elements, which `prepare` gets.
MeasuredWork pass_work(std::string name, const std::vector<int64_t>& elements,
                       const std::function<std::function<void()>(int64_t elements)>& prepare);

// The shape of elements in rows as wide as those of a model, or in one row.
std::vector<int64_t> rows_of(int64_t elements);

// Numbers like those of a model, and tokens. Not random ones: a recording that fails leaves a GPU's
// generator in a state that no later call can use.
at::Tensor some_numbers(at::IntArrayRef shape, const WorkPlace& place);
at::Tensor some_tokens(int64_t count, int64_t vocabulary, const WorkPlace& place);

}  // namespace fsdp::train
