// Muon for sharded models: matrices move by orthogonal directions, everything else by AdamW.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/optim/optimizer.h"

namespace fsdp {

// How far a matrix of m rows and n columns moves at one learning rate.
enum class MuonScale : uint8_t {
  kOriginal,  // sqrt(max(1, m / n)), as Muon's authors do
  // 0.2 * sqrt(max(m, n)): as far as AdamW's updates typically do, so that both share one rate and
  // one weight decay (Moonlight)
  kMatchAdamW,
};

// How products of several matrices of a rank are computed.
enum class MuonProducts : uint8_t {
  kSingle,  // one by one: the same bits whatever else a rank owns
  // Equal shapes of a unit in one batched product. Faster for small matrices on a device, whose
  // library may add up in another order for another size of the batch.
  kBatched,
};

struct MuonOptions {
  // The learning rate of matrices; Optimizer::set_learning_rate() changes it between steps.
  double lr = 1e-3;

  // AdamW's learning rate, relative to that of matrices. With kOriginal both usually differ.
  double adamw_rate_scale = 1.0;

  // How much of the momentum a step keeps, and whether it looks ahead along it.
  double momentum = 0.95;
  bool nesterov = true;

  // How far a matrix moves.
  MuonScale scale = MuonScale::kMatchAdamW;

  // Newton-Schulz: X <- a X + (b A + c A A) X with A = X X^T, so many times, from X with norm 1
  // (`norm_eps` or more is divided by). c is 0, or no less than an eighth of b: products compute
  // c (A + b / 2c)^2, which would lose digits.
  int32_t iterations = 5;
  double a = 3.4445;
  double b = -4.7750;
  double c = 2.0315;
  double norm_eps = 1e-7;

  // The type of its products: fp32 or bf16. nullopt: bf16 on a device, fp32 on a CPU.
  std::optional<at::ScalarType> products_dtype = std::nullopt;
  MuonProducts products = MuonProducts::kSingle;

  // A step takes lr * weight_decay of a weight away, for any gradient.
  double weight_decay = 0.1;

  // Whether vectors and scalars (biases, norms) do not decay.
  bool decay_spares_vectors = true;

  // Decay and rate by parameter names, of matrices and others; the first rule that matches counts.
  std::vector<ParameterRule> rules = {};

  // Type of the momentum (see AdamWOptions::first_moment).
  at::ScalarType momentum_dtype = at::kFloat;

  // --- of AdamW ---
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  at::ScalarType first_moment = at::kFloat;
  at::ScalarType second_moment = at::kFloat;

  // Clipping, skipping, loss scale, and when updates run.
  StepOptions step = {};
};

// Updates the parameters that ShardOptions::matrices names by Muon, and all others by AdamW. Each
// matrix is updated by its owner alone; nothing travels in a step but the gradient's norm. Keeps
// "momentum_buffer" of matrices, "exp_avg" and "exp_avg_sq" of the others, with the numbers of
// torch.optim.Muon and torch.optim.AdamW to rounding.
class Muon final : public Optimizer {
 public:
  explicit Muon(const Sharded& sharded, const MuonOptions& options = {});
};

}  // namespace fsdp
