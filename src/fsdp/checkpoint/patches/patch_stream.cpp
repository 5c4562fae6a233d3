#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/checkpoint/patches.h"
#include "fsdp/checkpoint/patches/changed_weights.h"
#include "fsdp/checkpoint/patches/output_tensors.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine_views.h"

namespace fsdp {

namespace {

constexpr const char* kPublishedNames = "hf";
constexpr const char* kVllmNames = "vllm";

// The changed elements of one tensor as they will be in a file, on the CPU.
struct EncodedTensor {
  EncodedPositions positions;
  at::Tensor values;
};

EncodedTensor encoded_tensor(const PatchTensor& tensor) {
  if (tensor.positions.defined()) return {encoded(tensor.positions), tensor.values.cpu()};
  std::vector<FlatRange> ranges;
  for (const PatchRange& range : tensor.ranges) ranges.push_back({range.begin, range.end});
  return {encoded(ranges), tensor.values.cpu()};
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()),
          static_cast<size_t>(tensor.nbytes())};
}

// The files of all ranks, known to all: each has written one.
std::vector<StoredFile> files_of_ranks(const Mesh& mesh, const StoredFile& mine) {
  const int64_t num_ranks = int64_t{mesh.outer().size()} * mesh.inner().size();
  at::Tensor all = at::zeros({num_ranks, 2}, at::kLong);
  all[rank_in(mesh)][0] = mine.bytes;
  all[rank_in(mesh)][1] = static_cast<int64_t>(mine.crc32c);
  for (const MeshAxis* axis : {&mesh.inner(), &mesh.outer()})
    if (axis->size() > 1)
      axis->reduce().all_reduce(all, {.op = ReduceOp::kMax}, "files of a patch").wait();
  std::vector<StoredFile> files;
  for (int64_t rank = 0; rank < num_ranks; ++rank)
    files.push_back({rank_text(rank) + ".safetensors", all[rank][0].item<int64_t>(),
                     static_cast<uint32_t>(all[rank][1].item<int64_t>())});
  return files;
}

}  // namespace

class PatchStream::Impl {
 public:
  Impl(const CheckpointState& state, PatchOptions options)
      : state_(state),
        options_(std::move(options)),
        published_(state_, options_.rules),
        output_(options_.names == PatchNames::kVllm ? as_vllm_has_them(published_.tensors())
                                                    : as_published(published_.tensors())),
        base_(drawn_id(mesh(), "base of patches")),
        begun_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()) {
    if (options_.keep < 0)
      throw UsageError(concat("keep of patches is ", options_.keep, ": use 0 or more"));
  }

  Patch take(int64_t step, c10::Device where) {
    begin(step);
    Patch patch{.base = base_, .from = last_, .to = step, .tensors = {}};
    together(concat("taking the patch of step ", step), [&] {
      for (auto& [index, tensor] : take_each<PatchTensor>(step, [&](PatchTensor tensor) {
             if (tensor.positions.defined()) tensor.positions = tensor.positions.to(where);
             tensor.values = tensor.values.to(where);
             return tensor;
           }))
        patch.tensors.push_back(std::move(tensor));
    });
    return patch;
  }

  std::string write(const std::string& directory, int64_t step) {
    begin(step);
    std::string path = write_next(directory, step);
    if (options_.keep > 0 && num_since_full_ >= options_.keep) {
      last_ = std::nullopt;
      write_next(directory, step);
      if (rank_in(mesh()) == 0) remove_old(directory);
    }
    return path;
  }

 private:
  const Mesh& mesh() const { return StateView(state_.sharded).mesh(); }

  std::string write_next(const std::string& directory, int64_t step) {
    const std::optional<int64_t> from = last_;
    const std::string name = patch_name(from, step);
    const std::string path = concat(directory, "/", name);
    const std::string temporary = concat(directory, "/.", name, ".", base_, ".tmp");
    const bool is_first = rank_in(mesh()) == 0;
    together(concat("preparing ", path), [&] {
      if (!is_first) return;
      if (!from) begin_after_others(directory);
      remove_tree(temporary);  // left by a failed attempt
      make_directories(temporary);
    });
    StoredFile mine;
    together(concat("writing ", path), [&] {
      const auto tensors = take_each<EncodedTensor>(
          step, [](const PatchTensor& tensor) { return encoded_tensor(tensor); });
      std::vector<StoredChange> changes;
      for (const auto& [index, tensor] : tensors)
        changes.push_back({output_.tensors[index], tensor.positions.form,
                           bytes_of(tensor.positions.numbers), bytes_of(tensor.values)});
      mine = write_patch_file(temporary, rank_in(mesh()), changes);
    });
    PatchRecord record{.base = base_,
                       .begun = begun_,
                       .from = from,
                       .to = step,
                       .names = options_.names == PatchNames::kVllm ? kVllmNames : kPublishedNames,
                       .tensors = output_.tensors,
                       .files = files_of_ranks(mesh(), mine)};
    together(concat("publishing ", path), [&] {
      if (is_first) publish_patch(temporary, path, record);
    });
    num_since_full_ = from ? num_since_full_ + 1 : 0;
    return path;
  }

  // Receivers take the stream that began last: this one, even if another host's clock is ahead.
  void begin_after_others(const std::string& directory) {
    for (const std::string& path : patches_in(directory)) {
      try {
        const PatchRecord record = read_patch_record(path);
        if (record.base != base_) begun_ = std::max(begun_, record.begun + 1);
      } catch (const Error&) {
        // Damaged: receivers pass over it, too.
      }
    }
  }

  // Receivers may still be reading what the last full patch but one began.
  void remove_old(const std::string& directory) noexcept {
    try {
      const std::vector<std::string> paths = patches_in(directory);
      const int64_t begin = std::exchange(full_step_, *last_);
      for (const std::string& path : paths)
        if (!is_kept(path, begin)) {
          const std::string removed = temporary_name_for(path);
          rename_durably(path, removed);  // never seen by halves
          remove_tree(removed);
        }
    } catch (const std::exception& error) {
      log(LogLevel::kWarning, error.what());
    }
  }

  // Keeps patches of this stream, from the full one of step `begin` on.
  bool is_kept(const std::string& path, int64_t begin) const {
    try {
      const PatchRecord record = read_patch_record(path);
      return record.base == base_ && (record.to > begin || (record.to == begin && !record.from));
    } catch (const Error&) {
      return false;
    }
  }

  // Runs a part of a patch on all ranks; if it fails on one, receivers miss a patch for good, so
  // the next one is full.
  template <typename Body>
  void together(const std::string& doing, const Body& body) {
    try {
      on_all_ranks(mesh(), doing, body);
    } catch (...) {
      last_ = std::nullopt;
      throw;
    }
  }

  Optimizer::Impl& optimizer() const { return OptimizerAccess::of(*state_.optimizer); }

  void begin(int64_t step) {
    // Changes that another stream took are marked no more.
    if (optimizer().num_mark_takes() != num_mark_takes_) last_ = std::nullopt;
    if (step < 0 || (last_ && step <= *last_))
      throw UsageError(concat("step is ", step, "; a patch leads to a step after ",
                              last_ ? concat(*last_, ", which the one before led to") : "-1"));
  }

  // use(elements) of each output tensor of which this rank has some, by index. A tensor is
  // used as soon as its last part is there, so that what a device has of others is gone by then.
  template <typename Result, typename Use>
  std::map<size_t, Result> take_each(int64_t step, const Use& use) {
    const at::NoGradGuard no_grad;
    struct Joined {
      ChangedTensor elements;
      int64_t num_missing = 0;  // published tensors
    };
    std::vector<Joined> joined(output_.tensors.size());
    for (const auto& [name, place] : output_.places) ++joined[place.tensor].num_missing;
    const auto which = last_ ? ChangedWeights::Which::kChanged : ChangedWeights::Which::kEverything;
    // Marks are taken one after the other: should that end halfway, the next patch is full.
    last_ = std::nullopt;
    num_mark_takes_ = optimizer().take_marks();
    std::map<size_t, Result> results;
    published_.take(which, [&](const std::string& name, ChangedTensor elements) {
      const OutputPlace& place = output_.places.at(name);
      auto& [all, num_missing] = joined[place.tensor];
      elements.shift(place.offset);
      all.append(std::move(elements));
      if (--num_missing > 0 || all.is_empty()) return;
      const StoredTensor& output = output_.tensors[place.tensor];
      results.emplace(place.tensor, use(std::move(all).as_patch(output.name, output.shape)));
    });
    last_ = step;
    return results;
  }

  const CheckpointState state_;
  const PatchOptions options_;
  ChangedWeights published_;
  const OutputTensors output_;
  const std::string base_;
  int64_t begun_;
  std::optional<int64_t> last_;  // the step of the last patch
  int64_t num_mark_takes_ = -1;  // of the optimizer, up to this stream's last one
  int64_t num_since_full_ = 0;   // patches that were written
  int64_t full_step_ = -1;       // of the last full patch that ended a round of `keep`
};

PatchStream::PatchStream(const CheckpointState& state, PatchOptions options)
    : impl_(std::make_unique<Impl>(state, std::move(options))) {}
PatchStream::~PatchStream() = default;

Patch PatchStream::take(int64_t step, c10::Device where) { return impl_->take(step, where); }
std::string PatchStream::write(const std::string& directory, int64_t step) {
  return impl_->write(directory, step);
}

}  // namespace fsdp
