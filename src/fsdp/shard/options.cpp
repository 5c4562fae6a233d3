#include "fsdp/shard/options.h"

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/memory/bucket_pool.h"
#include "fsdp/shard/option_fields.h"

namespace fsdp {

namespace {

void check_floating(const char* field, std::optional<at::ScalarType> type) {
  if (!type || is_floating(dtype_of(*type))) return;
  throw UsageError(concat("precision.", field, " is ", c10::toString(*type),
                          "; weights and gradients need fp64, fp32, fp16 or bf16"));
}

void check_wide_enough(const char* field, std::optional<at::ScalarType> type) {
  if (!type || element_bytes(dtype_of(*type)) >= 2) return;
  throw UsageError(concat("precision.", field, " is ", c10::toString(*type),
                          "; sums need 16 bits or more: use fp64, fp32, fp16 or bf16"));
}

std::optional<DType> optional_dtype(std::optional<at::ScalarType> type) {
  if (!type) return std::nullopt;
  return dtype_of(*type);
}

template <typename Value>
void read_parsed(const std::string& option, const std::string& text, Value& value,
                 Value (*parse)(std::string_view)) {
  try {
    value = parse(text);
  } catch (const UsageError& error) {
    throw UsageError(concat(option, ": ", error.what()));
  }
}

}  // namespace

ChoiceNames choice_names(WeightRecipe) {
  ChoiceNames names;
  for (const WeightRecipeRow& row : all_weight_recipes()) names.emplace_back(row.name);
  return names;
}

void read_text(const std::string& option, const std::string& text, Strategy& value) {
  read_parsed(option, text, value, parse_strategy);
}

void read_text(const std::string& option, const std::string& text, Granularity& value) {
  read_parsed(option, text, value, parse_granularity);
}

std::string to_text(const MatrixParameters& named) {
  const auto& [pattern, rows] = named;
  return rows.empty() ? pattern : concat(pattern, " of rows ", list_text(rows));
}

std::string OptionText<at::ScalarType>::write(at::ScalarType value, const OptionFlag&) {
  for (const DType dtype : all_dtypes())
    if (scalar_type_of(dtype) == value) return std::string(name_of(dtype));
  return c10::toString(value);
}

PrecisionTypes PrecisionPolicy::types() const {
  return {.main_params = optional_dtype(main_params),
          .main_storage = main_storage,
          .main_grads = optional_dtype(main_grads),
          .grad_comm = optional_dtype(grad_comm),
          .first_moment = std::nullopt,
          .second_moment = std::nullopt};
}

void ShardOptions::validate() const {
  check_legal(strategy);
  check_floating("params", precision.params);
  check_floating("main_params", precision.main_params);
  for (const auto& [field, type] :
       {std::pair{"params", precision.params}, std::pair{"main_grads", precision.main_grads},
        std::pair{"grad_comm", precision.grad_comm}}) {
    check_floating(field, type);
    check_wide_enough(field, type);
  }
  if (quantization.recipe != WeightRecipe::kPlain && precision.main_params != at::kFloat)
    throw UsageError(
        concat("quantization.recipe is ", row_of(quantization.recipe).name,
               ", for which main weights are fp32, but precision.main_params is ",
               precision.main_params ? c10::toString(*precision.main_params) : "nullopt",
               "; set it to fp32"));
  if (row_of(quantization.recipe).scale_bytes == 1 && offload.fraction > 0.0)
    throw UsageError(concat("quantization.recipe is ", row_of(quantization.recipe).name,
                            ", whose blocks must not be cut, but offload.fraction is ",
                            offload.fraction, ", which cuts shards anywhere; set it to 0"));
  if (matrices != WholeMatrices{} && offload.fraction > 0.0)
    throw UsageError(concat("matrices must stay whole, but offload.fraction is ", offload.fraction,
                            ", which cuts shards anywhere; set it to 0"));
  if (lanes != 0 && !is_power_of_two(lanes))
    throw UsageError(concat("lanes is ", lanes, "; it must be a power of two, or 0 for none"));
  if (device && device->is_meta())
    throw UsageError("device is meta; name the device that computes, such as cpu or cuda:0");
  if (!(offload.fraction >= 0.0 && offload.fraction <= 1.0))
    throw UsageError(concat("offload.fraction is ", offload.fraction,
                            "; it is a part of every shard: use a number from 0 to 1"));
  if (offload.chunk_numel < 1)
    throw UsageError(concat("offload.chunk_numel is ", offload.chunk_numel,
                            "; use 1 or more elements, such as 1048576"));
  if (user_buffers != UserBuffers::kOff && pool == PoolKind::kOnDemand)
    throw UsageError(concat("user_buffers is ", name_of(user_buffers),
                            ", which needs memory that stays where it is, but pool is on_demand; "
                            "use planned, max_pool or double_buffer"));
  if (user_buffers != UserBuffers::kOff && allocator != nullptr)
    throw UsageError(concat("user_buffers is ", name_of(user_buffers),
                            ", for which NCCL allocates, but an allocator is given; drop one of "
                            "the two"));
  PoolOptions{.kind = pool, .prefetch = prefetch, .budget_bytes = pool_budget_bytes}.validate();
}

}  // namespace fsdp
