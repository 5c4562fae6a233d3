// Muon's update of the matrices that a rank owns: momentum, Newton-Schulz, weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "fsdp/memory/slab_allocator.h"
#include "fsdp/optim/kernels/thread_team.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/muon.h"
#include "fsdp/optim/update_state.h"
#include "fsdp/shard/engine/engine_memory.h"

namespace fsdp {

// The numbers of Muon, of its matrices alone.
struct MatrixRule {
  double momentum = 0.95;
  bool nesterov = true;
  MuonScale scale = MuonScale::kMatchAdamW;
  int32_t iterations = 5;
  double a = 0.0;
  double b = 0.0;
  double c = 0.0;
  double norm_eps = 0.0;
  std::optional<at::ScalarType> products_dtype = std::nullopt;
  MuonProducts products = MuonProducts::kSingle;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
  double adamw_rate_scale = 1.0;  // of everything else
  MomentKind momentum_kind = {};
};

// How much the learning rate is multiplied by for a matrix.
double matrix_rate_scale(MuonScale scale, int64_t rows, int64_t columns);

// Three passes over a matrix X that lies in memory of its own between them:
//
//   momentum   M <- mu M + (1 - mu) G,  X <- (1 - mu) G + mu M, or M       SGD's kernel
//   direction  X <- X / |X|, then iterations of Newton-Schulz              products of libtorch
//   weights    W <- W - rate * (scale X + decay W)                         SGD's kernel
//
// The first and the last are steps of SGD: one with X, which begins as 0, for a weight and -1 for a
// rate, and one with X for a gradient. So types of gradients, moments and weights, split ones too,
// clipping and skipping are those of every update. No call waits for a device.
class MatrixUpdates {
 public:
  MatrixUpdates(const MatrixRule& rule, EngineMemory& memory, c10::Device device);

  // Allocates what these groups' matrices need; call it before the first step.
  void reserve(const std::vector<GroupUpdate>& groups);

  void set_momentum(double momentum) { rule_.momentum = momentum; }

  // Begins a step with the bytes of its StepState.
  void begin(const at::Tensor& state);
  // Updates the matrices of a group. `workspace` is that of the norm on a device.
  void run(const GroupUpdate& update, const at::Tensor& workspace, ThreadTeam& team);

 private:
  // Matrices of equal shape, by the numbers of their spans.
  struct Batch {
    const UpdatePiece* piece = nullptr;
    int64_t rows = 0;
    int64_t columns = 0;
    std::vector<size_t> spans;
    int64_t first_sum = 0;  // its matrices' place in sums_
  };

  std::vector<Batch> batches_of(const GroupUpdate& update) const;
  void run(const GroupUpdate& update, const Batch& batch, const at::Tensor& workspace,
           ThreadTeam& team);
  // Leads from the update's direction in the first part of the memory to the orthogonal one, whose
  // place it returns.
  at::Tensor orthogonal(const Batch& batch, const at::Tensor& workspace, ThreadTeam& team);
  at::Tensor take(int64_t& begin, at::IntArrayRef shape) const;

  MatrixRule rule_;
  EngineMemory& memory_;
  const c10::Device device_;
  const at::ScalarType dtype_;
  at::Tensor momentum_state_;  // bytes of a StepState: of this step for the first pass,
  at::Tensor weight_state_;    // and for the last one
  at::Tensor sums_;            // of squares, one for each matrix of the rank
  Slab slab_;
  std::unordered_map<const GroupUpdate*, std::vector<Batch>> batches_;
};

}  // namespace fsdp
