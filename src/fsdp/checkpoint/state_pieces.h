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
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/weight_export.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/shard/group/param_group.h"

namespace fsdp {

// All of a checkpoint's tensors, and the pieces of them that this rank writes. Ranks that have the
// same values write a part each.
struct StatePieces {
  std::vector<StoredTensor> model;
  std::vector<StoredTensor> moments;
  std::vector<Piece> model_pieces;
  std::vector<Piece> moment_pieces;
};

// The pieces read the live state, so nothing may change it while they are used.
StatePieces pieces_of(const CheckpointState& state, const StoredForm& form);

// The pieces of the weights alone.
StatePieces weight_pieces_of(const CheckpointState& state, const StoredForm& form,
                             WeightValues values);

// Ranks that have the same main weights and moments of a group, counted over all axes as one
// number.
struct Replicas {
  int64_t count = 1;
  int64_t index = 0;
};
Replicas replicas_with(const ParamGroup& group);

// Throws an Error if two tensors would be stored under one name.
void check_names(const CheckpointState& state, const NameRules& names);

// A group's flat buffer of one kind: main weights, or a moment. Elements are those of the whole
// buffer.
struct FlatState {
  const ParamGroup* group = nullptr;
  std::string moment = {};        // "exp_avg"; "": weights
  DType dtype = DType::kFloat32;  // of values that are read and set, on the CPU
  std::function<void(FlatRange flat, const at::Tensor& into)> read;
  std::function<void(FlatRange flat, const at::Tensor& values)> set = {};
  // The memory that has these values; and that may be written in place of set(). nullptr: there is
  // none.
  std::function<const void*(FlatRange flat)> in_memory = {};
  std::function<void*(FlatRange flat)> settable = {};
};

FlatState main_weights_of(ParamGroup& group, DType dtype);

// All moments of the state's optimizer, this library's or another's, in the order of the files.
std::vector<FlatState> flat_moments_of(const CheckpointState& state);

// The values that a forward computes with: elements [flat) of a group's whole buffer, to the CPU.
// Quantised weights have none but their main weights.
void read_computing_weights(const ParamGroup& group, FlatRange flat, const at::Tensor& into);

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
