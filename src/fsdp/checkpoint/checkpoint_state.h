// What a checkpoint is of: a sharded model, its optimizer, and tensors that every rank has.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/checkpoint/manifest.h"
#include "fsdp/checkpoint/name_rules.h"
#include "fsdp/checkpoint/piece_writer.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/shard/sharded.h"

namespace fsdp {

// A tensor that is no parameter and equal on all ranks: a running mean, a table.
struct NamedBuffer {
  std::string name;
  at::Tensor value;
};

// Refers to what it names, which must outlive it.
struct CheckpointState {
  Sharded sharded;
  Optimizer* optimizer = nullptr;  // nullptr: weights alone
  std::vector<NamedBuffer> buffers = {};
};

// How tensors are stored.
struct StoredForm {
  // What the files call tensors, and how they divide fused ones.
  NameRules names = {};
  // Of floating-point weights. nullopt: what the optimizer updates, which is exact.
  std::optional<DType> model_dtype = std::nullopt;
};

// All of a checkpoint's tensors, and the pieces of them that this rank writes. Where several ranks
// have the same values each writes a part.
struct StatePieces {
  std::vector<StoredTensor> model;
  std::vector<StoredTensor> moments;
  std::vector<Piece> model_pieces;
  std::vector<Piece> moment_pieces;
};

// Pieces read the live state: nothing may change it while they are used.
StatePieces pieces_of(const CheckpointState& state, const StoredForm& form);

// The manifest without its files.
Manifest describe(const CheckpointState& state, const StatePieces& pieces, int64_t step);

}  // namespace fsdp
