// Brings the pieces that ranks have of a tensor together, a chunk at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/piece_writer.h"
#include "fsdp/checkpoint/weight_export.h"
#include "fsdp/comm/mesh.h"

namespace fsdp {

// Takes tensors one after the other.
class TensorSink {
 public:
  virtual ~TensorSink() = default;
  virtual void begin(const StoredTensor& tensor) = 0;
  // The bytes that follow, of this tensor.
  virtual void write(std::span<const std::byte> bytes) = 0;
  virtual void end() = 0;
};

// Note [Way of a chunk]: a chunk is neighbouring elements of a stored tensor. Every rank packs what
// it has of them; the packed bytes go along the inner axis to the first rank of each row, and from
// there along the outer axis to rank 0, which puts them in order. Each rank knows the boxes of all,
// so nothing but elements travels. Two buffers of a chunk are enough: a step reads one and writes
// the other.
//
// Refers to its arguments. All ranks construct and call it alike.
class PieceExchange {
 public:
  // The ranks' pieces of a tensor must be exactly the tensor, as those of weight_pieces_of().
  PieceExchange(const Mesh& mesh, std::span<const StoredTensor> tensors,
                std::span<const Piece> pieces, const ExportOptions& options);

  // Gives all of tensor `index` to the receivers' sinks; others are not called. An exception of a
  // sink, or of a piece, is thrown at the end of the tensor, and an Error on all other ranks.
  void stream(size_t index, TensorSink& sink);

 private:
  struct RankBox {
    int64_t rank = 0;
    int64_t piece = 0;  // its number among the rank's
    Box box;
  };
  // The elements of a chunk that one box has.
  struct Part {
    const RankBox* owner = nullptr;
    Box box;
  };

  bool is_receiver() const;
  void gather_boxes();
  std::vector<Part> parts_of(size_t index, FlatRange chunk) const;
  void pack(std::span<const Part> parts, int64_t width, std::byte* into) const;
  // Moves this rank's bytes to rank 0; returns the buffer that has them there: 0 or 1.
  int collect(std::span<const Part> parts, int64_t width);
  void put_in_order(size_t index, FlatRange chunk, std::span<const Part> parts, int from);
  void broadcast(int64_t bytes, int buffer);
  std::byte* data(int buffer) const;

  const Mesh& mesh_;
  const std::span<const StoredTensor> tensors_;
  const std::span<const Piece> pieces_;
  const ExportOptions options_;
  std::vector<std::vector<RankBox>> boxes_;  // of each tensor, in the order of ranks
  at::Tensor buffers_;                       // two chunks
};

}  // namespace fsdp
