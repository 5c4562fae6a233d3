// The list of the fields of ShardOptions (base/option_fields.h), with the words of its choices.
#pragma once

#include <string>
#include <vector>

#include "fsdp/base/option_fields.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// --- words and texts of values -------------------------------------------------------------------

inline ChoiceNames choice_names(MainStorage) { return names_of(all_main_storages()); }
inline ChoiceNames choice_names(PoolKind) { return names_of(all_pool_kinds()); }
inline ChoiceNames choice_names(OnMove) { return {"follow", "refuse"}; }
inline ChoiceNames choice_names(OtherUnits) { return {"on_demand", "persistent"}; }
inline ChoiceNames choice_names(UserBuffers) {
  using enum UserBuffers;
  return {name_of(kOff), name_of(kRegistered), name_of(kSymmetric)};
}
inline ChoiceNames choice_names(GradientOf) { return {"mean", "sum"}; }
inline ChoiceNames choice_names(GradientLifetime) { return {"persistent", "step"}; }
inline ChoiceNames choice_names(ReportNan) { return {"off", "per_parameter"}; }
inline ChoiceNames choice_names(Collectives) { return {"between_ranks", "always"}; }
inline ChoiceNames choice_names(InitialValues) { return {"of_every_rank", "of_rank_zero"}; }
inline ChoiceNames choice_names(ProductForm) { return {"quantized", "plain"}; }
ChoiceNames choice_names(WeightRecipe);

void read_text(const std::string& option, const std::string& text, Strategy& value);
void read_text(const std::string& option, const std::string& text, Granularity& value);

// "*.up.weight cut over tp along dim 0", "*.qkv.weight of rows [64, 16]".
std::string to_text(const TensorParameters& named);
std::string to_text(const MatrixParameters& named);

template <>
struct OptionText<at::ScalarType> {
  static std::string write(at::ScalarType value, const OptionFlag&);
  static void read(const std::string& option, const std::string& text, at::ScalarType& value,
                   const OptionFlag& flag) {
    value = scalar_type_of(*parse_dtype_or(option, text, flag.absent));
  }
};

// Ranks have devices of one kind, with numbers of their own.
template <>
struct OptionText<c10::Device> {
  static std::string write(c10::Device value, const OptionFlag&) {
    return c10::DeviceTypeName(value.type(), /*lower_case=*/true);
  }
};

// --- fields --------------------------------------------------------------------------------------

template <typename Visit>
void visit_fields(PrecisionPolicy& options, const Visit& visit) {
  auto& [params, main_params, main_storage, main_grads, grad_comm] = options;
  constexpr const char* kGroup = "sharding";
  visit({"precision.params", "params"}, params, kNoFlag);
  visit({"precision.main_params", "main_params"}, main_params,
        OptionFlag{kGroup, "main-params", "DTYPE",
                   "Main weights; none: the optimizer updates the weights themselves"});
  visit({"precision.main_storage", "main_storage"}, main_storage,
        OptionFlag{kGroup, "main-storage", "HOW",
                   "fp32 main weights of bf16 weights: separate or split"});
  visit({"precision.main_grads", "main_grads"}, main_grads,
        OptionFlag{kGroup, "main-grads", "DTYPE",
                   "What microbatches add up in; none: as the weights"});
  visit({"precision.grad_comm", "grad_comm"}, grad_comm,
        OptionFlag{kGroup, "grad-comm", "DTYPE",
                   "What gradients travel in; none: as the main gradients"});
}

template <typename Visit>
void visit_fields(Quantization& options, const Visit& visit) {
  auto& [recipe, except, weight_gradient, frozen] = options;
  constexpr const char* kGroup = "model";
  visit({"quantization.recipe", "weights"}, recipe,
        OptionFlag{kGroup, "weights", "RECIPE",
                   "How matrices of linear layers and experts are gathered and multiplied: bf16 "
                   "(as --compute says), fp8-row, fp8-tensor or fp8-block; mxfp8 is gathered so, "
                   "and multiplied as --compute says"});
  visit({"quantization.except", "weights_except"}, except,
        OptionFlag{kGroup, "weights-except", "GLOB...",
                   "Parameters that stay as --compute says, by name: 'model.layers.0.*'"});
  visit({"quantization.weight_gradient", "weights_gradient"}, weight_gradient,
        OptionFlag{kGroup, "weights-gradient", "HOW",
                   "How gradients of --weights are multiplied: quantized, or as --compute says"});
  visit({"quantization.frozen"}, frozen, kNoFlag);
}

// Hosts may have more memory or less, and no number depends on where it is.
template <typename Visit>
void visit_fields(Offload& options, const Visit& visit) {
  auto& [fraction, pin, overlap, chunk_numel] = options;
  visit({"offload.fraction", "offload", true}, fraction,
        OptionFlag{"sharding", "offload", "FRACTION",
                   "How much of the optimizer's state is in the host's memory", 0, 1});
  visit({"offload.pin", "offload_pin", true}, pin, kNoFlag);
  visit({"offload.overlap", "offload_overlap", true}, overlap, kNoFlag);
  visit({"offload.chunk_numel", "offload_chunk_numel", true}, chunk_numel, kNoFlag);
}

template <typename Visit>
void visit_fields(WholeMatrices& options, const Visit& visit) {
  auto& [declared, named, except] = options;
  visit({"matrices.declared"}, declared, kNoFlag);
  visit({"matrices.named", "matrices"}, named, kNoFlag);
  visit({"matrices.except", "matrices_except"}, except,
        OptionFlag{"optimizer", "muon-except", "NAMES...",
                   "Muon: matrices that AdamW updates, by name: 'model.layers.0.*'"});
}

// Takes the struct apart by the names of all its fields, so that a new field does not compile until
// it is added here. Allocators are left out.
template <typename Visit>
void visit_fields(ShardOptions& options, const Visit& visit) {
  auto& [strategy, units, expert_parameters, tensor_parameters, precision, quantization, pool,
         prefetch, pool_budget_bytes, on_move, other_units, user_buffers, gradient, lanes,
         gradient_lifetime, offload, report_nan, collectives, granularity, matrices, initial_values,
         device, allocator, host_allocator] = options;
  constexpr const char* kGroup = "sharding";
  visit({"strategy", "strategy"}, strategy,
        OptionFlag{kGroup, "strategy", "NAME",
                   "What is sharded: no_shard, optim, optim_grads, optim_grads_params, the last "
                   "three also with +hfsdp, or placements such as RS/PS/SS"});
  visit({"units"}, units, kNoFlag);
  visit({"expert_parameters", "expert_parameters"}, expert_parameters, kNoFlag);
  visit({"tensor_parameters", "tensor_parameters"}, tensor_parameters, kNoFlag);
  visit_fields(precision, visit);
  visit_fields(quantization, visit);
  visit({"pool", "pool"}, pool,
        OptionFlag{kGroup, "pool", "KIND",
                   "Memory of gathered weights and unreduced gradients: on_demand, double_buffer, "
                   "max_pool or planned"});
  visit({"prefetch", "prefetch"}, prefetch,
        OptionFlag{kGroup, "prefetch", "N", "Units gathered ahead of the one that computes", 0,
                   4096});
  visit({"pool_budget_bytes", "pool_budget_bytes"}, pool_budget_bytes,
        OptionFlag{kGroup, "pool-budget", kBytesType,
                   "Gather as far ahead as the pool can within this much memory; none: as "
                   "--prefetch says"});
  visit({"on_move", "on_move"}, on_move, kNoFlag);
  visit({"other_units", "other_units"}, other_units,
        OptionFlag{kGroup, "other-units", "WHAT",
                   "double_buffer: memory of units unlike the most common one"});
  visit({"user_buffers", "user_buffers"}, user_buffers,
        OptionFlag{kGroup, "user-buffers", "HOW",
                   "Whether NCCL uses the memory that collectives touch in place"});
  visit({"gradient", "gradient"}, gradient, kNoFlag);
  visit({"lanes"}, lanes, kNoFlag);
  visit({"gradient_lifetime", "gradient_lifetime"}, gradient_lifetime,
        OptionFlag{kGroup, "gradient-lifetime", "HOW",
                   "Whether main gradients keep their memory between steps"});
  visit_fields(offload, visit);
  visit({"report_nan", "report_nan"}, report_nan,
        OptionFlag{"machine", "name-nan", kFlagType,
                   "Search every gradient for NaN and Inf, and name the parameter"});
  visit({"collectives", "collectives"}, collectives, kNoFlag);
  visit({"granularity", "granularity"}, granularity,
        OptionFlag{kGroup, "granularity", "WHERE",
                   "Where a shard may end: element, row, block(N) or tensor"});
  visit_fields(matrices, visit);
  visit({"initial_values", "initial_values"}, initial_values, kNoFlag);
  visit({"device", "device"}, device, kNoFlag);
}

}  // namespace fsdp
