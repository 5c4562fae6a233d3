#include "fsdp/checkpoint/weight_export.h"

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/state_pieces.h"
#include "fsdp/checkpoint/tools/converted_files.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/shard/engine/engine_views.h"

namespace fsdp {

namespace {

// --- the exchange of pieces ----------------------------------------------------------------------

// All ranks' numbers, in their order along the axis.
std::vector<int64_t> gather_numbers(const MeshAxis& axis, const std::vector<int64_t>& mine) {
  if (axis.size() == 1) return mine;
  const at::Tensor counts = at::empty({axis.size()}, at::kLong);
  axis.gather()
      .all_gather(counts, at::full({1}, std::ssize(mine), at::kLong), "sizes of lists of boxes")
      .wait();
  const std::span<const int64_t> each(counts.const_data_ptr<int64_t>(),
                                      static_cast<size_t>(axis.size()));
  const at::Tensor all = at::empty({counts.sum().item<int64_t>()}, at::kLong);
  axis.gather().all_gather(all, at::tensor(mine, at::kLong), "lists of boxes", each).wait();
  const int64_t* const numbers = all.const_data_ptr<int64_t>();
  return {numbers, numbers + all.numel()};
}

// Takes tensors one after the other.
class TensorSink {
 public:
  virtual ~TensorSink() = default;
  virtual void begin(const StoredTensor& /*tensor*/) {}
  // The bytes that follow, of this tensor.
  virtual void write(std::span<const std::byte> bytes) = 0;
  virtual void end() {}
};

// Brings the pieces that ranks have of a tensor together, a chunk at a time.
//
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
                std::span<const Piece> pieces, const ExportOptions& options)
      : mesh_(mesh), tensors_(tensors), pieces_(pieces), options_(options), boxes_(tensors.size()) {
    gather_boxes();
    int64_t largest = 0;
    for (const StoredTensor& tensor : tensors) largest = std::max(largest, bytes_of(tensor));
    buffers_ = at::empty({2, std::min(largest, options.chunk_bytes)}, at::kByte);
  }

  // Gives all of tensor `index` to the receivers' sinks; others are not called. An exception of a
  // sink, or of a piece, is thrown at the end of the tensor, and an Error on all other ranks.
  void stream(size_t index, TensorSink& sink) {
    const StoredTensor& tensor = tensors_[index];
    const int64_t width = element_bytes(tensor.dtype);
    const int64_t step = std::max<int64_t>(options_.chunk_bytes / width, 1);
    std::exception_ptr error;
    // A rank that has failed goes on moving bytes, since the others wait for them.
    const auto guarded = [&error](const auto& body) {
      try {
        if (!error) body();
      } catch (...) {
        error = std::current_exception();
      }
    };
    if (is_receiver()) guarded([&] { sink.begin(tensor); });
    for (int64_t begin = 0; begin < numel_of(tensor); begin += step) {
      const FlatRange chunk{begin, std::min(begin + step, numel_of(tensor))};
      const std::vector<Part> parts = parts_of(index, chunk);
      guarded([&] { pack(parts, width, data(0)); });
      int buffer = collect(parts, width);
      if (rank_in(mesh_) == 0) put_in_order(index, chunk, parts, buffer);
      buffer = rank_in(mesh_) == 0 ? 1 - buffer : 0;
      const int64_t bytes = chunk.numel() * width;
      if (options_.receivers == ExportOptions::Receivers::kAllRanks) broadcast(bytes, buffer);
      if (is_receiver()) guarded([&] { sink.write({data(buffer), static_cast<size_t>(bytes)}); });
    }
    if (is_receiver()) guarded([&] { sink.end(); });
    agree_on_success(mesh_, error, concat("exporting '", tensor.name, "'"));
  }

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

  bool is_receiver() const {
    return options_.receivers == ExportOptions::Receivers::kAllRanks || rank_in(mesh_) == 0;
  }

  // A box is a list of numbers: rank, piece, tensor, offsets, sizes.
  void gather_boxes() {
    std::unordered_map<std::string, int64_t> places;
    for (size_t i = 0; i < tensors_.size(); ++i) places[tensors_[i].name] = static_cast<int64_t>(i);
    std::vector<int64_t> numbers;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Box& box = pieces_[i].box;
      numbers.insert(numbers.end(),
                     {rank_in(mesh_), static_cast<int64_t>(i), places.at(pieces_[i].name)});
      numbers.insert(numbers.end(), box.offsets.begin(), box.offsets.end());
      numbers.insert(numbers.end(), box.sizes.begin(), box.sizes.end());
    }
    // Rows first, so that the list is in the order of rank_in().
    numbers = gather_numbers(mesh_.outer(), gather_numbers(mesh_.inner(), numbers));
    for (auto next = numbers.cbegin(); next != numbers.cend();) {
      const int64_t rank = *next++;
      const int64_t piece = *next++;
      const auto tensor = static_cast<size_t>(*next++);
      const auto num_dims = std::ssize(tensors_[tensor].shape);
      boxes_[tensor].push_back(
          {rank, piece, {{next, next + num_dims}, {next + num_dims, next + 2 * num_dims}}});
      next += 2 * num_dims;
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      int64_t numel = 0;
      for (const RankBox& box : boxes_[i]) numel += box.box.numel();
      FSDP_ASSERT(numel == numel_of(tensors_[i]), "ranks have ", numel, " elements of ",
                  tensors_[i].name);
    }
  }

  std::vector<Part> parts_of(size_t index, FlatRange chunk) const {
    const std::vector<Box> chunk_boxes = boxes(tensors_[index].shape, chunk);
    std::vector<Part> parts;
    for (const RankBox& owner : boxes_[index])
      for (const Box& box : chunk_boxes)
        if (Box common = intersect(owner.box, box); common.numel() > 0)
          parts.push_back({&owner, std::move(common)});
    return parts;
  }

  void pack(std::span<const Part> parts, int64_t width, std::byte* into) const {
    // A read may convert numbers of 8 bytes, with a copy or two of them.
    constexpr int64_t kReadNumel = kExportReadBytes / 32;
    for (const Part& part : parts) {
      if (part.owner->rank != rank_in(mesh_)) continue;
      const Piece& piece = pieces_[static_cast<size_t>(part.owner->piece)];
      for (const Run& run : runs(packed(piece.box, 0), packed(part.box, 0)))
        for (int64_t done = 0; done < run.numel; done += kReadNumel) {
          const int64_t numel = std::min(kReadNumel, run.numel - done);
          piece.read({run.from + done, run.from + done + numel}, into + (run.to + done) * width);
        }
      into += part.box.numel() * width;
    }
  }

  // Moves this rank's bytes to rank 0; returns the buffer that has them there: 0 or 1.
  int collect(std::span<const Part> parts, int64_t width) {
    std::vector<int64_t> row(static_cast<size_t>(mesh_.inner().size()));
    std::vector<int64_t> rows(static_cast<size_t>(mesh_.outer().size()));
    for (const Part& part : parts) {
      const int64_t bytes = part.box.numel() * width;
      const int64_t outer = part.owner->rank / mesh_.inner().size();
      rows[static_cast<size_t>(outer)] += bytes;
      if (outer == mesh_.outer().rank())
        row[static_cast<size_t>(part.owner->rank % mesh_.inner().size())] += bytes;
    }
    int buffer = 0;
    const auto move = [&](const MeshAxis& axis, const std::vector<int64_t>& bytes_of_ranks) {
      if (axis.size() == 1) return;
      const bool is_first = axis.rank() == 0;
      std::vector<int64_t> sent(bytes_of_ranks.size());
      sent[0] = bytes_of_ranks[static_cast<size_t>(axis.rank())];
      const std::vector<int64_t> received =
          is_first ? bytes_of_ranks : std::vector<int64_t>(bytes_of_ranks.size());
      int64_t total = 0;
      for (const int64_t bytes : received) total += bytes;
      axis.gather()
          .all_to_all(buffers_[1 - buffer].narrow(0, 0, total),
                      buffers_[buffer].narrow(0, 0, sent[0]), "chunk of a tensor", received, sent)
          .wait();
      buffer = 1 - buffer;
    };
    move(mesh_.inner(), row);
    if (mesh_.inner().rank() == 0) move(mesh_.outer(), rows);
    return buffer;
  }

  void put_in_order(size_t index, FlatRange chunk, std::span<const Part> parts, int from) {
    const int64_t width = element_bytes(tensors_[index].dtype);
    const StridedBox ordered_chunk = flattened(tensors_[index].shape, chunk.begin);
    const std::byte* packed_bytes = data(from);
    std::byte* const ordered = data(1 - from);
    for (const Part& part : parts) {
      for (const Run& run : runs(packed(part.box, 0), part_of(ordered_chunk, part.box)))
        std::memcpy(ordered + run.to * width, packed_bytes + run.from * width,
                    static_cast<size_t>(run.numel * width));
      packed_bytes += part.box.numel() * width;
    }
  }

  void broadcast(int64_t bytes, int buffer) {
    const at::Tensor chunk = buffers_[buffer].narrow(0, 0, bytes);
    // Along the first column, and from there along the rows.
    if (mesh_.outer().size() > 1 && mesh_.inner().rank() == 0)
      mesh_.outer().gather().broadcast(chunk, 0, "chunk of a tensor").wait();
    if (mesh_.inner().size() > 1)
      mesh_.inner().gather().broadcast(chunk, 0, "chunk of a tensor").wait();
  }

  std::byte* data(int buffer) const {
    return static_cast<std::byte*>(buffers_[buffer].mutable_data_ptr());
  }

  const Mesh& mesh_;
  const std::span<const StoredTensor> tensors_;
  const std::span<const Piece> pieces_;
  const ExportOptions options_;
  std::vector<std::vector<RankBox>> boxes_;  // of each tensor, in the order of ranks
  at::Tensor buffers_;                       // two chunks
};

// --- who receives them ---------------------------------------------------------------------------

void check_options(const ExportOptions& options) {
  // The widest element must fit.
  if (options.chunk_bytes < 8)
    throw UsageError(concat("chunk_bytes of an export is ", options.chunk_bytes,
                            "; give at least 8, such as ", ExportOptions{}.chunk_bytes));
}

// The pieces of a state at rest.
StatePieces settled_pieces(const CheckpointState& state, const ExportOptions& options) {
  check_options(options);
  StateView(state.sharded).wait();
  return weight_pieces_of(state, options.form, options.values);
}

// Assembles whole tensors.
class WholeTensors final : public TensorSink {
 public:
  explicit WholeTensors(const OnTensor& on_tensor) : on_tensor_(on_tensor) {}

  void begin(const StoredTensor& tensor) override {
    name_ = tensor.name;
    value_ = at::empty(tensor.shape, scalar_type_of(tensor.dtype));
    next_ = static_cast<std::byte*>(value_.mutable_data_ptr());
  }
  void write(std::span<const std::byte> bytes) override {
    std::memcpy(next_, bytes.data(), bytes.size());
    next_ += bytes.size();
  }
  void end() override {
    // Moved, so that a receiver that keeps nothing never has two tensors.
    const at::Tensor value = std::move(value_);
    on_tensor_(name_, value);
  }

 private:
  const OnTensor& on_tensor_;
  std::string name_;
  at::Tensor value_;
  std::byte* next_ = nullptr;
};

// The directory of an export; only rank 0 has one.
class ExportDirectory final : public TensorSink {
 public:
  void open(const std::string& path, const std::vector<StoredTensor>& tensors,
            const ExportFiles& files) {
    directory_.emplace(path, files.existing == ExportFiles::Existing::kReplace
                                 ? StagedDirectory::Existing::kReplace
                                 : StagedDirectory::Existing::kRefuse);
    HuggingFaceOptions options{.max_file_bytes = files.max_file_bytes};
    if (!files.model_config.empty()) options.config = files.model_config;
    options.model_files = files.model_files;
    files_.emplace(directory_->path(), tensors, std::move(options));
  }
  void write(std::span<const std::byte> bytes) override { files_->write(bytes); }
  void publish() {
    files_->finish();
    directory_->publish();
  }

 private:
  std::optional<StagedDirectory> directory_;
  std::optional<HuggingFaceFiles> files_;  // in it
};

void stream_all(const Mesh& mesh, const StatePieces& pieces, const ExportOptions& options,
                TensorSink& sink) {
  PieceExchange exchange(mesh, pieces.model, pieces.model_pieces, options);
  for (size_t i = 0; i < pieces.model.size(); ++i) exchange.stream(i, sink);
}

}  // namespace

int64_t export_bytes(const ExportOptions& options) {
  return 2 * options.chunk_bytes + kExportReadBytes;
}

void export_weights(const CheckpointState& state, const OnTensor& on_tensor,
                    const ExportOptions& options) {
  const at::NoGradGuard no_grad;
  WholeTensors tensors(on_tensor);
  stream_all(StateView(state.sharded).mesh(), settled_pieces(state, options), options, tensors);
}

ExportedFiles export_weights(const CheckpointState& state, const std::string& directory,
                             const ExportFiles& files, const ExportOptions& options) {
  const at::NoGradGuard no_grad;
  if (options.receivers == ExportOptions::Receivers::kAllRanks)
    throw UsageError(
        "receivers of an export to a directory are all ranks, but one rank writes it; leave them "
        "at rank 0");
  const StatePieces pieces = settled_pieces(state, options);
  const StateView view(state.sharded);
  const Mesh& mesh = view.mesh();
  const bool is_writer = rank_in(mesh) == 0;
  ExportDirectory written;
  on_all_ranks(mesh, concat("beginning the export to ", directory), [&] {
    if (is_writer) written.open(directory, pieces.model, files);
  });
  stream_all(mesh, pieces, options, written);
  on_all_ranks(mesh, concat("publishing the export to ", directory), [&] {
    if (is_writer) written.publish();
  });
  ExportedFiles exported{.num_tensors = std::ssize(pieces.model)};
  for (const StoredTensor& tensor : pieces.model) exported.bytes += bytes_of(tensor);
  return exported;
}

}  // namespace fsdp
