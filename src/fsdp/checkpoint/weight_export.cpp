#include "fsdp/checkpoint/weight_export.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/checkpoint/piece_exchange.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/state_pieces.h"
#include "fsdp/checkpoint/tools/huggingface_files.h"
#include "fsdp/checkpoint/tools/staged_directory.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace {

void check_options(const ExportOptions& options) {
  // The widest element must fit.
  if (options.chunk_bytes < 8)
    throw UsageError(concat("chunk_bytes of an export is ", options.chunk_bytes,
                            "; give at least 8, such as ", ExportOptions{}.chunk_bytes));
}

// The pieces of a state at rest.
StatePieces settled_pieces(const CheckpointState& state, const ExportOptions& options) {
  check_options(options);
  EngineAccess::of(state.sharded).wait();
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
  void begin(const StoredTensor&) override { files_->next(); }
  void write(std::span<const std::byte> bytes) override { files_->write(bytes); }
  void end() override {}
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
  stream_all(EngineAccess::of(state.sharded).mesh(), settled_pieces(state, options), options,
             tensors);
}

ExportedFiles export_weights(const CheckpointState& state, const std::string& directory,
                             const ExportFiles& files, const ExportOptions& options) {
  const at::NoGradGuard no_grad;
  if (options.receivers == ExportOptions::Receivers::kAllRanks)
    throw UsageError(
        "receivers of an export to a directory are all ranks, but one rank writes it; leave them "
        "at rank 0");
  const StatePieces pieces = settled_pieces(state, options);
  const Mesh& mesh = EngineAccess::of(state.sharded).mesh();
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
