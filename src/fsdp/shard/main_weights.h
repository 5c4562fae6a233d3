// What the optimizer updates of a group: the weights themselves, a wider copy, or what they lack.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/shard/flat_buffer.h"
#include "fsdp/shard/group_setting.h"

namespace fsdp {

// A contiguous run of the optimizer's part of a group, in one memory and stored in one way.
struct MainWeightPiece {
  FlatRange flat;     // in the group's whole buffer
  at::Tensor weight;  // the same elements of the weights; on the model's device
  at::Tensor main;    // undefined: the weight is the main weight
  // `main` is the 16-bit remainder that makes the bf16 weight an fp32 number (split_tensor.h).
  bool is_split = false;
  // `main` lies in host memory, and so does whatever else the optimizer keeps.
  bool is_offloaded = false;
};

// Pieces lie in the order of the optimizer's shard. The last elements of it are offloaded, exactly
// as many as the fraction says; on the host the main weight is always there, and whole.
class MainWeights {
 public:
  MainWeights(const FlatLayout& layout, const GroupTypes& types, const GroupSetting& setting,
              const FlatBuffer& weight);

  const std::vector<MainWeightPiece>& pieces() const { return pieces_; }
  at::ScalarType dtype() const { return dtype_; }
  // Whether every main weight is a number in memory of its own or the weight's, on the device.
  bool has_views() const;

  // Elements of the whole that this rank's optimizer has: a view where has_views(), else a copy.
  at::Tensor at(FlatRange range) const;

  // The same into memory of the caller's, on any device and of any type.
  void copy_to(FlatRange range, const at::Tensor& into) const;

  // Where they lie one after the other in host memory in this type; nullptr where they do not.
  const void* in_host_memory(FlatRange range, at::ScalarType dtype) const;
  // The same where writing there is all that set() would do.
  void* settable_in_host_memory(FlatRange range, at::ScalarType dtype);

  // Takes over values of elements [range) of the whole, in this type or a wider one; of what lies
  // outside this rank's part nothing.
  void set(FlatRange range, const at::Tensor& values);

  // Main weights were changed: rounds them into the weights.
  void refresh();

 private:
  void add_pieces(const std::vector<ShardRange>& ranges, const Slab& slab, at::ScalarType dtype,
                  c10::Device device, const FlatBuffer& weight);

  const at::ScalarType dtype_;
  const c10::Device model_device_;
  Slab device_;
  Slab host_;
  std::vector<MainWeightPiece> pieces_;
};

}  // namespace fsdp
