#include "fsdp/checkpoint/load.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/load_plan.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/state_pieces.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/reduce/sum_order.h"
#include "fsdp/layout/state_bytes.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine_views.h"

namespace fsdp {

namespace {

std::byte* byte_pointer(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

struct FlatTarget {
  FlatState state;
  std::vector<TensorSource> sources;  // of the group's members

  at::ScalarType type() const { return scalar_type_of(state.dtype); }
};

std::vector<WantedTensor> wanted_of(const ParamGroup& group, DType dtype,
                                    const LoadOptions& options) {
  std::vector<WantedTensor> wanted;
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const std::vector<std::string>& names = group.members()[static_cast<size_t>(i)].names;
    wanted.push_back(
        {.name = names.front(),
         .aliases = {names.begin() + 1, names.end()},
         .shape = group.whole_shape_of(i),
         .dtype = dtype,
         .owned = group.owned_of(i),
         .keeps_value = !options.only.empty() && !matches_any_glob(options.only, names.front())});
  }
  return wanted;
}

// Reads and sets targets, as many at once as fit a chunk of memory, so that neighbouring small
// units in a file are one read.
class TargetLoader {
 public:
  TargetLoader(const TensorCatalog& catalog, const LoadOptions& options)
      : reader_(catalog.files(), options.read),
        room_(at::empty({round_up(std::clamp(options.chunk_bytes, kScaleBlock * 8, kMaxRoomBytes),
                                  kAlignBytes)},
                        at::kByte)) {}

  const ReadStatistics& statistics() const { return reader_.statistics(); }

  void load(const FlatTarget& target) {
    if (std::all_of(target.sources.begin(), target.sources.end(),
                    [](const TensorSource& source) { return source.is_missing(); }))
      return;
    // Chunks end with blocks of scales, because moments with scales are set a block at a time.
    const int64_t width = static_cast<int64_t>(c10::elementSize(target.type()));
    const int64_t most = room_.numel() / width / kScaleBlock * kScaleBlock;
    for (const MainWeightPiece& piece : target.state.group->main_weights().pieces())
      for (int64_t begin = piece.flat.begin; begin < piece.flat.end;) {
        const int64_t end = std::min((begin / kScaleBlock) * kScaleBlock + most, piece.flat.end);
        const FlatRange chunk{begin, end};
        if (void* const memory = settable_memory(target, chunk)) {
          add_reads(target, chunk, tensor_over(memory, chunk.numel(), target.type(), c10::kCPU));
        } else {
          if (used_ + chunk.numel() * width > room_.numel()) flush();
          chunks_.push_back({&target, chunk, take_room(chunk.numel(), target.type())});
          fill_rest(target, chunk, chunks_.back().values);
          add_reads(target, chunk, chunks_.back().values);
        }
        begin = end;
      }
  }

  void load(const TensorSource& source, const at::Tensor& into) {
    const at::Tensor values = at::empty(into.sizes(), scalar_type_of(source.dtype()));
    std::vector<FileRun> runs;
    source.add_reads({0, into.numel()}, byte_pointer(values), runs);
    reader_.read(std::move(runs));
    into.copy_(values);
  }

  // Reads and sets the rest.
  void flush() {
    reader_.read(std::exchange(runs_, {}));
    for (const auto& [from, to] : std::exchange(conversions_, {})) to.copy_(from);
    for (const Chunk& chunk : std::exchange(chunks_, {}))
      chunk.target->state.set(chunk.flat, chunk.values);
    used_ = 0;
  }

 private:
  static constexpr int64_t kAlignBytes = 64;
  static constexpr int64_t kMaxRoomBytes = int64_t{1} << 30;  // more gains nothing

  struct Chunk {
    const FlatTarget* target = nullptr;
    FlatRange flat;
    at::Tensor values;
  };

  // Calls body(source, its elements in the chunk, the same in the tensor) for the chunk's tensors.
  template <typename Body>
  static void for_each_tensor(const FlatTarget& target, FlatRange chunk, const Body& body) {
    for (int64_t i = 0; i < target.state.group->layout().num_tensors(); ++i) {
      const FlatRange tensor = target.state.group->layout().tensor_range(i);
      const FlatRange common = intersect(tensor, chunk);
      if (!common.empty())
        body(target.sources[static_cast<size_t>(i)], common,
             FlatRange{common.begin - tensor.begin, common.end - tensor.begin});
    }
  }

  // Fills the elements that are not read: padding, and tensors that keep their values.
  static void fill_rest(const FlatTarget& target, FlatRange chunk, const at::Tensor& values) {
    int64_t numel = 0;
    for_each_tensor(target, chunk, [&](const TensorSource& source, FlatRange flat, FlatRange) {
      numel += flat.numel();
      if (source.is_missing()) numel = -chunk.numel();
    });
    if (numel == chunk.numel()) return;
    values.zero_();
    for_each_tensor(target, chunk, [&](const TensorSource& source, FlatRange flat, FlatRange) {
      if (source.is_missing())
        target.state.read(flat, values.narrow(0, flat.begin - chunk.begin, flat.numel()));
    });
  }

  void add_reads(const FlatTarget& target, FlatRange chunk, const at::Tensor& values) {
    for_each_tensor(
        target, chunk, [&](const TensorSource& source, FlatRange flat, FlatRange range) {
          if (source.is_missing()) return;
          const at::Tensor part = values.narrow(0, flat.begin - chunk.begin, flat.numel());
          at::Tensor stored = part;
          if (source.dtype() != target.state.dtype) {
            stored = at::empty({flat.numel()}, scalar_type_of(source.dtype()));
            conversions_.emplace_back(stored, part);
          }
          source.add_reads(range, byte_pointer(stored), runs_);
        });
  }

  // nullptr: values must be converted, or are set in another way.
  static void* settable_memory(const FlatTarget& target, FlatRange chunk) {
    const bool is_converted =
        std::any_of(target.sources.begin(), target.sources.end(), [&](const TensorSource& source) {
          return !source.is_missing() && source.dtype() != target.state.dtype;
        });
    return is_converted || !target.state.settable ? nullptr : target.state.settable(chunk);
  }

  // Reuses the same memory: the first use of a page costs as much as reading it.
  at::Tensor take_room(int64_t numel, at::ScalarType dtype) {
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    const at::Tensor taken = room_.narrow(0, used_, bytes).view(dtype);
    used_ = std::min(round_up(used_ + bytes, kAlignBytes), room_.numel());
    return taken;
  }

  VerifiedReader reader_;
  const at::Tensor room_;
  int64_t used_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<FileRun> runs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> conversions_;  // from, to
};

// Everything to be set, and its sources.
class Loading {
 public:
  Loading(const std::string& path, const CheckpointState& state, const LoadOptions& options)
      : state_(state), options_(options), plan_(checkpoint_or_files(path), options.names) {
    const StateView view(state.sharded);
    for (const auto& unit : view.units())
      for (ParamGroup& group : unit->groups()) {
        const DType dtype = dtype_of(group.main_weights().dtype());
        targets_.push_back(
            {main_weights_of(group, dtype), plan_.find_model(wanted_of(group, dtype, options))});
      }
    for (const NamedBuffer& buffer : state.buffers) {
      const WantedTensor wanted{.name = buffer.name,
                                .aliases = {},
                                .shape = buffer.value.sizes().vec(),
                                .dtype = dtype_of(buffer.value.scalar_type())};
      buffers_.push_back(plan_.find_model({&wanted, 1}).front());
    }
    CheckpointState with_moments = state;
    if (!plan_.catalog().manifest()) with_moments.other = nullptr;
    if (with_moments.other != nullptr) take_kind(*with_moments.other);
    for (FlatState& moment : flat_moments_of(with_moments)) {
      std::vector<TensorSource> sources =
          plan_.find_moments(wanted_of(*moment.group, moment.dtype, options), moment.moment);
      targets_.push_back({std::move(moment), std::move(sources)});
    }
    plan_.check({.allow_missing = options.allow_missing,
                 .ignored = options.ignored,
                 .allows_extra = options.extra == LoadOptions::Extra::kAllow,
                 .is_offered = options.is_tolerance_offered});
  }

  LoadedCheckpoint describe() const {
    LoadedCheckpoint loaded;
    loaded.path = plan_.catalog().path();
    loaded.missing = plan_.missing();
    loaded.extra = plan_.extra();
    if (!plan_.catalog().manifest()) return loaded;
    const Manifest& manifest = *plan_.catalog().manifest();
    loaded.step = manifest.step;
    loaded.schedule = manifest.schedule;
    loaded.optimizer = manifest.optimizer.settings;
    loaded.optimizer_step = manifest.optimizer.step;
    for (const RankRecord& record : plan_.catalog().ranks())
      loaded.data_of_ranks.push_back(record.data_position);
    const StateView view(state_.sharded);
    const Mesh& mesh = view.mesh();
    loaded.has_random_state = manifest.num_ranks() == mesh.size();
    const SumOrder order{.ranks = mesh.size(), .group = mesh.sum_group()};
    if (rank_in(mesh) == 0 && loaded.has_random_state && manifest.sum_group > 0 &&
        !order.adds_like(manifest.sum_group))
      log(LogLevel::kInfo, "the checkpoint's ranks added gradients in groups of ",
          manifest.sum_group, ", these add them in groups of ", mesh.sum_group(),
          ": the run goes on with other bits, unless FSDP_SUM_GROUP is ", manifest.sum_group);
    if (loaded.has_random_state)
      loaded.data = loaded.data_of_ranks[static_cast<size_t>(rank_in(mesh))];
    return loaded;
  }

  void run(LoadedCheckpoint& loaded) {
    TargetLoader loader(plan_.catalog(), options_);
    for (const FlatTarget& target : targets_) loader.load(target);
    loader.flush();
    for (size_t i = 0; i < buffers_.size(); ++i)
      if (!buffers_[i].is_missing()) loader.load(buffers_[i], state_.buffers[i].value);
    loaded.statistics = loader.statistics();
    if (state_.optimizer != nullptr && plan_.catalog().manifest()) {
      const OptimizerRecord& record = plan_.catalog().manifest()->optimizer;
      state_.optimizer->set_state({.step = record.step,
                                   .skipped = record.skipped,
                                   .loss_scale = record.loss_scale,
                                   .good_steps = record.good_steps});
      OptimizerAccess::of(*state_.optimizer).set_late_updates(record.late_updates);
    }
    if (loaded.has_random_state)
      set_random_state(plan_.catalog()
                           .ranks()[static_cast<size_t>(rank_in(StateView(state_.sharded).mesh()))]
                           .random_state,
                       StateView(state_.sharded).device());
  }

 private:
  // An optimizer of others gets what the checkpoint has.
  void take_kind(OtherOptimizer& other) const {
    const OptimizerRecord& record = plan_.catalog().manifest()->optimizer;
    if (!record.name.empty() && record.name != other.name)
      throw UsageError(concat(plan_.catalog().path(), " has the state of ", record.name,
                              ", and the optimizer is ", other.name, "; load the weights alone"));
    other.tensors = record.moments;
    other.step = record.step;
  }

  const CheckpointState& state_;
  const LoadOptions& options_;
  LoadPlan plan_;
  std::vector<FlatTarget> targets_;
  std::vector<TensorSource> buffers_;
};

}  // namespace

LoadedCheckpoint load_checkpoint(const std::string& path, const CheckpointState& state,
                                 const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  const StateView engine(state.sharded);
  engine.wait();
  if (state.optimizer != nullptr) state.optimizer->wait();

  std::unique_ptr<Loading> loading;
  LoadedCheckpoint loaded;
  on_all_ranks(engine.mesh(), "opening the checkpoint", [&] {
    loading = std::make_unique<Loading>(path, state, options);
    loaded = loading->describe();
  });
  try {
    on_all_ranks(engine.mesh(), "reading the checkpoint", [&] { loading->run(loaded); });
  } catch (const AbortedError&) {
    throw;  // a rank is gone, which says nothing of the checkpoint
  } catch (const Error& known) {
    throw DamagedCheckpoint(known.what());
  }
  engine.take_over_main_weights();
  return loaded;
}

}  // namespace fsdp
