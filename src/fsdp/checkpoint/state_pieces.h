// A checkpoint's content cut into the pieces that ranks write, its copy in host memory, which a
// background save writes, and the states of random generators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/piece_writer.h"
#include "fsdp/checkpoint/weight_export.h"

namespace fsdp {

// All of a checkpoint's tensors, and the pieces of them that this rank writes. Ranks that have the
// same values write a part each.
struct StatePieces {
  std::vector<StoredTensor> model;
  std::vector<StoredTensor> moments;  // and amax histories
  std::vector<Piece> model_pieces;
  std::vector<Piece> moment_pieces;
};

// The pieces read the live state, so nothing may change it while they are used.
StatePieces pieces_of(const CheckpointState& state, const StoredForm& form);

// The same without moments and amax histories.
StatePieces weight_pieces_of(const CheckpointState& state, const StoredForm& form,
                             WeightValues values);

// The manifest without its files.
Manifest describe(const CheckpointState& state, const StatePieces& pieces, int64_t step);

// --- a copy in host memory -----------------------------------------------------------------------

class Snapshot {
 public:
  // Page-locked if the state is on another device, so that copies run at the speed of the bus.
  explicit Snapshot(c10::Device device) : device_(device) {}

  // Copies everything the pieces read, and makes them read the copy from here on. Pieces of an
  // earlier call must not be used any more.
  void take(StatePieces& pieces);

  int64_t bytes() const { return memory_.defined() ? memory_.numel() : 0; }

 private:
  const c10::Device device_;
  at::Tensor memory_;
};

// --- random generators ---------------------------------------------------------------------------

// The states of libtorch's default generators for the CPU and, if it is another device, `device`.
std::string random_state(c10::Device device);

// Throws an Error if the bytes are not such states.
void set_random_state(const std::string& state, c10::Device device);

}  // namespace fsdp
