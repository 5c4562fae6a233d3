// The main weights of a group: the weights themselves, a wider copy, or the weights' remainders.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/shard/group/flat_buffer.h"
#include "fsdp/shard/group/group_setting.h"

namespace fsdp {

// Split storage: fp32 numbers as bf16 numbers and remainders, 4 bytes instead of 6 for a weight
// that computes in bf16 and is updated in fp32.
//
// bits of fp32 = (bits of bf16 << 16) + remainder, a signed 16-bit number; optim's kernels/
// split_weight.h says why. Exact both ways except for the payload of NaNs.

// bf16 and remainder of the same length give a new fp32 tensor.
at::Tensor join_halves(const at::Tensor& upper, const at::Tensor& remainder);

// The inverse: writes upper and remainder.
void split_into_halves(const at::Tensor& values, const at::Tensor& upper,
                       const at::Tensor& remainder);

// A contiguous run of the optimizer's part of a group, in one memory and stored in one way.
struct MainWeightPiece {
  FlatRange flat;  // in the group's whole buffer
  // These elements of the weights, on the model's device; of quantised ones the main weights,
  // wherever they are, because there are no other numbers.
  at::Tensor weight;
  at::Tensor main;  // undefined: the weight is the main weight
  // `main` is the 16-bit remainder that makes the bf16 weight an fp32 number (join_halves).
  bool is_split = false;
  // `main` lies in host memory, like everything else that the optimizer keeps.
  bool is_offloaded = false;
};

// Pieces lie in the order of the optimizer's shard. Its last elements are offloaded, exactly as
// many as the fraction says; on the host the main weight always exists, as a whole number.
class MainWeights {
 public:
  MainWeights(const FlatLayout& layout, const GroupTypes& types, const GroupSetting& setting,
              const FlatBuffer& weight);

  const std::vector<MainWeightPiece>& pieces() const { return pieces_; }
  at::ScalarType dtype() const { return dtype_; }
  // Whether every main weight is on the device as a number, in its own memory or the weight's.
  bool has_views() const;

  // Elements of the whole that this rank's optimizer has: a view if has_views(), else a copy.
  at::Tensor at(FlatRange range) const;

  // Copies them into the caller's memory, on any device and of any type.
  void copy_to(FlatRange range, const at::Tensor& into) const;

  // Their address if they are contiguous in host memory in this type; else nullptr.
  const void* in_host_memory(FlatRange range, at::ScalarType dtype) const;
  // in_host_memory() where writing there is all that set() would do.
  void* settable_in_host_memory(FlatRange range, at::ScalarType dtype);

  // Sets elements [range) of the whole from values of this type or a wider one; ignores those
  // outside this rank's part.
  void set(FlatRange range, const at::Tensor& values);

  // After main weights were changed: rounds them into the weights.
  void refresh();

  // Frees them. Codes of frozen weights need them no more; nor may anybody else.
  void drop();
  bool is_dropped() const { return is_dropped_; }

  // Whether values were set or refreshed since the last call: then an optimizer's marks do not say
  // what has changed, and everything counts as changed. Marks compare main weights rounded as
  // updates do, so refreshed ones, in which ties are even, are rounded again; afterwards call
  // Engine::take_over_main_weights.
  bool take_is_rewritten();

 private:
  void add_pieces(const std::vector<ShardRange>& ranges, const Slab& slab, at::ScalarType dtype,
                  c10::Device device, const FlatBuffer& weight, bool is_quantized);

  const at::ScalarType dtype_;
  const c10::Device model_device_;
  Slab device_;
  Slab host_;
  std::vector<MainWeightPiece> pieces_;
  bool is_dropped_ = false;
  bool is_rewritten_ = true;
  bool is_refreshed_ = false;
};

}  // namespace fsdp
