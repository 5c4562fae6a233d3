#include "fsdp/checkpoint/state_pieces.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine_views.h"

namespace fsdp {

namespace {

// Smaller tensors are written by one replica alone, because parts would be many small reads.
constexpr int64_t kMinShareNumel = int64_t{1} << 18;

// The part of `held` that one of several replicas writes; cut between rows where possible.
FlatRange share_of(FlatRange held, std::span<const int64_t> shape, Replicas replicas,
                   int64_t tensor) {
  int64_t row = 1;
  for (size_t i = 1; i < shape.size(); ++i) row *= std::max<int64_t>(shape[i], 1);
  const int64_t share = std::max(ceil_div(held.numel(), replicas.count), kMinShareNumel);
  const auto cut = [&](int64_t i) {
    const int64_t offset = i * share;
    if (i == 0 || offset >= held.numel()) return i == 0 ? held.begin : held.end;
    return std::min(round_up(held.begin + offset, row), held.end);
  };
  // Small tensors go to different ranks.
  const int64_t place = (replicas.index + tensor) % replicas.count;
  const FlatRange part{cut(place), cut(place + 1)};
  return part.empty() ? FlatRange{} : part;
}

// The part of a tensor that this rank writes: `range` of the slice that it owns, which begins at
// `flat_begin` of the reader's buffer.
struct Written {
  std::vector<int64_t> shape;  // of the slice
  OwnedSlice owned;
  FlatRange range;
  int64_t flat_begin = 0;
};

// Collects one set of tensors: the model's, or those of the optimizer.
class PieceCollector {
 public:
  PieceCollector(const NameRules& names, int64_t rank, std::vector<StoredTensor>& tensors,
                 std::vector<Piece>& pieces)
      : names_(names), rank_(rank), tensors_(tensors), pieces_(pieces) {}

  void add(const std::string& name, const Written& written,
           const std::shared_ptr<const FlatState>& state) {
    const std::string suffix = state->moment.empty() ? "" : "." + state->moment;
    const std::vector<TensorSection> sections =
        names_.sections(name, whole_shape(written.owned, written.shape));
    for (const TensorSection& section : sections) {
      tensors_.push_back({section.name + suffix, state->dtype, section.shape});
      add_without_elements(tensors_.back());
    }
    const std::vector<int64_t> strides = strides_of(written.shape);
    const int64_t flat_begin = written.flat_begin - written.range.begin;
    for (const OwnedBox& box : owned_boxes(written.owned, written.shape, written.range))
      for (const SectionBox& part : cut_at_sections(sections, box.whole)) {
        const StridedBox place{part.model, strides, flat_begin + place_of(part, box, strides)};
        pieces_.push_back(
            piece_of(sections[part.section].name + suffix, part.stored, place, state));
      }
  }

  // Gives a tensor without elements an empty box, or no file would mention it.
  void add_without_elements(const StoredTensor& tensor) {
    const std::vector<int64_t>& shape = tensor.shape;
    if (rank_ == 0 && std::find(shape.begin(), shape.end(), 0) != shape.end())
      pieces_.push_back({.name = tensor.name,
                         .dtype = tensor.dtype,
                         .box = {std::vector<int64_t>(shape.size(), 0), shape},
                         .read = {}});
  }

  // Reads the elements of a box row by row, or at once if they are contiguous.
  static Piece piece_of(std::string name, const Box& stored, const StridedBox& place,
                        const std::shared_ptr<const FlatState>& state) {
    const std::vector<Run> stretches = runs(place, packed(place.box, 0));
    const int64_t width = element_bytes(state->dtype);
    Piece piece{.name = std::move(name), .dtype = state->dtype, .box = stored, .read = {}};
    piece.read = [stretches, width, state](FlatRange range, std::byte* into) {
      for (const Run& run : stretches) {
        const FlatRange common = intersect({run.to, run.to + run.numel}, range);
        if (common.empty()) continue;
        const int64_t begin = run.from + (common.begin - run.to);
        state->read({begin, begin + common.numel()},
                    tensor_over(into + (common.begin - range.begin) * width, common.numel(),
                                scalar_type_of(state->dtype), c10::kCPU));
      }
    };
    if (stretches.size() == 1 && state->in_memory)
      piece.in_memory = [begin = place.begin, state](FlatRange range) {
        return static_cast<const std::byte*>(
            state->in_memory({begin + range.begin, begin + range.end}));
      };
    return piece;
  }

  const NameRules& names_;
  const int64_t rank_;
  std::vector<StoredTensor>& tensors_;
  std::vector<Piece>& pieces_;
};

bool is_stored(const std::string& name, const StoredForm& form) {
  return form.only.empty() || matches_any_glob(form.only, name);
}

DType stored_dtype(const ParamGroup& group, WeightValues values, const StoredForm& form) {
  const DType dtype =
      values == WeightValues::kMain ? dtype_of(group.main_weights().dtype()) : group.types().weight;
  return is_floating(dtype) ? form.model_dtype.value_or(dtype) : dtype;
}

FlatState computing_weights_of(const ParamGroup& group, DType dtype) {
  return {
      .group = &group, .dtype = dtype, .read = [&group](FlatRange flat, const at::Tensor& into) {
        read_computing_weights(group, flat, into);
      }};
}

FlatState state_of_buffer(const at::Tensor& value) {
  return {.dtype = dtype_of(value.scalar_type()),
          .read = [value](FlatRange flat, const at::Tensor& into) {
            into.copy_(value.detach().reshape({-1}).narrow(0, flat.begin, flat.numel()));
          }};
}

// Adds all that this rank writes of a group's tensors.
void add_members(FlatState state, const StoredForm& form, int64_t& number, PieceCollector& into) {
  const auto shared = std::make_shared<const FlatState>(std::move(state));
  const ParamGroup& group = *shared->group;
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    if (!is_stored(group.name_of(i), form)) continue;
    const FlatRange range =
        share_of(group.held_of(i), group.shape_of(i), replicas_with(group), number++);
    into.add(group.name_of(i),
             {group.shape_of(i), group.owned_of(i), range,
              group.layout().tensor_range(i).begin + range.begin},
             shared);
  }
}

// --- an optimizer of others ----------------------------------------------------------------------

// Calls body(member, elements in the group's buffer, the same in this rank's part) for the members
// of which this rank has something in [flat).
void for_each_held(const ParamGroup& group, FlatRange flat, const auto& body) {
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const FlatRange held = group.held_of(i);
    const int64_t begin = group.layout().tensor_range(i).begin + held.begin;
    const FlatRange common = intersect({begin, begin + held.numel()}, flat);
    if (!common.empty()) body(i, common, FlatRange{common.begin - begin, common.end - begin});
  }
}

// 0 where the optimizer has none.
void read_other(const OtherOptimizer& optimizer, const ParamGroup& group, const std::string& tensor,
                FlatRange flat, const at::Tensor& into) {
  into.zero_();
  for_each_held(group, flat, [&](int64_t member, FlatRange common, FlatRange part) {
    const auto it = optimizer.parts.find({group.name_of(member), tensor});
    if (it == optimizer.parts.end()) return;
    into.narrow(0, common.begin - flat.begin, common.numel())
        .copy_(it->second.narrow(0, part.begin, part.numel()));
  });
}

// Parts are made where there are none.
void set_other(OtherOptimizer& optimizer, const ParamGroup& group, const std::string& tensor,
               FlatRange flat, const at::Tensor& values) {
  for_each_held(group, flat, [&](int64_t member, FlatRange common, FlatRange part) {
    at::Tensor& own = optimizer.parts[{group.name_of(member), tensor}];
    if (!own.defined()) own = at::zeros({group.held_of(member).numel()}, at::kFloat);
    own.narrow(0, part.begin, part.numel())
        .copy_(values.narrow(0, common.begin - flat.begin, common.numel()));
  });
}

std::string precision_text(const PrecisionPolicy& precision) {
  const PrecisionTypes types = precision.types();
  const auto name = [](std::optional<DType> dtype) {
    return dtype ? std::string(name_of(*dtype)) : std::string("as the weights");
  };
  return concat("main_params ", name(types.main_params), ", main_grads ", name(types.main_grads),
                ", grad_comm ", name(types.grad_comm));
}

GroupRecord record_of(const ParamGroup& group) {
  GroupRecord record{.dtype = group.types().weight,
                     .is_trainable = group.is_trainable(),
                     .granularity = to_text(group.layout().request().granularity),
                     .padded_numel = group.layout().padded_numel(),
                     .members = {}};
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const std::vector<std::string>& names = group.members()[static_cast<size_t>(i)].names;
    record.members.push_back({.name = names.front(),
                              .aliases = {names.begin() + 1, names.end()},
                              .shape = group.whole_shape_of(i),
                              .flat = group.layout().tensor_range(i)});
  }
  return record;
}

constexpr int64_t kAlignBytes = 64;

int64_t piece_bytes(const Piece& piece) { return piece.box.numel() * element_bytes(piece.dtype); }

std::vector<at::Generator> generators(c10::Device device) {
  std::vector<at::Generator> all = {at::detail::getDefaultCPUGenerator()};
  if (!device.is_cpu()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

}  // namespace

void check_names(const CheckpointState& state, const NameRules& names) {
  std::vector<NamedShape> tensors;
  const StateView view(state.sharded);
  for (const auto& unit : view.units())
    for (const ParamGroup& group : unit->groups())
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i)
        tensors.push_back({group.name_of(i), group.whole_shape_of(i)});
  for (const NamedBuffer& buffer : state.buffers)
    tensors.push_back({buffer.name, buffer.value.sizes().vec()});
  check_unique(names, tensors);
}

Replicas replicas_with(const ParamGroup& group) {
  const GroupSetting& setting = group.setting();
  const PlacementPair placed = setting.strategy.optimizer;
  Replicas replicas;
  if (placed.inner == Placement::kReplicate) replicas = {setting.shape.inner, setting.rank.inner};
  if (placed.outer == Placement::kReplicate)
    replicas = {replicas.count * setting.shape.outer,
                replicas.index * setting.shape.outer + setting.rank.outer};
  return replicas;
}

FlatState main_weights_of(ParamGroup& group, DType dtype) {
  MainWeights& weights = group.main_weights();
  const at::ScalarType type = scalar_type_of(dtype);
  return {
      .group = &group,
      .dtype = dtype,
      .read =
          [&weights](FlatRange flat, const at::Tensor& into) {
            const at::NoGradGuard no_grad;
            weights.copy_to(flat, into);
          },
      .set = [&weights](FlatRange flat, const at::Tensor& values) { weights.set(flat, values); },
      .in_memory = [&weights, type](FlatRange flat) { return weights.in_host_memory(flat, type); },
      .settable = [&weights,
                   type](FlatRange flat) { return weights.settable_in_host_memory(flat, type); }};
}

std::vector<FlatState> flat_moments_of(const CheckpointState& state) {
  std::vector<FlatState> moments;
  if (state.optimizer != nullptr)
    for (GroupUpdate* update : OptimizerAccess::of(*state.optimizer).group_updates())
      for (size_t which = 0; which < update->moments().size(); ++which) {
        const auto memory = [update, which](FlatRange flat) {
          return update->moment_in_host_memory(which, flat);
        };
        moments.push_back({.group = &update->group(),
                           .moment = update->moments()[which].name,
                           .read =
                               [update, which](FlatRange flat, const at::Tensor& into) {
                                 update->read_moment(which, flat, into.mutable_data_ptr<float>());
                               },
                           .set =
                               [update, which](FlatRange flat, const at::Tensor& values) {
                                 update->set_moment(which, flat, values.const_data_ptr<float>());
                               },
                           .in_memory = memory,
                           .settable = memory});
      }
  if (state.other == nullptr) return moments;
  const StateView view(state.sharded);
  for (const auto& unit : view.units())
    for (const ParamGroup& group : unit->groups()) {
      if (!group.is_trainable()) continue;
      for (const std::string& tensor : state.other->tensors)
        moments.push_back(
            {.group = &group,
             .moment = tensor,
             .read = [&group, other = state.other, tensor](
                         FlatRange flat,
                         const at::Tensor& into) { read_other(*other, group, tensor, flat, into); },
             .set =
                 [&group, other = state.other, tensor](FlatRange flat, const at::Tensor& values) {
                   set_other(*other, group, tensor, flat, values);
                 }});
    }
  return moments;
}

void read_computing_weights(const ParamGroup& group, FlatRange flat, const at::Tensor& into) {
  const at::NoGradGuard no_grad;
  for (const MainWeightPiece& piece : group.main_weights().pieces())
    if (const FlatRange common = intersect(piece.flat, flat); !common.empty())
      into.narrow(0, common.begin - flat.begin, common.numel())
          .copy_(piece.weight.narrow(0, common.begin - piece.flat.begin, common.numel()));
}

StatePieces weight_pieces_of(const CheckpointState& state, const StoredForm& form,
                             WeightValues values) {
  const StateView engine(state.sharded);
  check_names(state, form.names);
  StatePieces pieces;
  const int64_t number_of_rank = rank_in(engine.mesh());
  PieceCollector model(form.names, number_of_rank, pieces.model, pieces.model_pieces);
  int64_t number = 0;
  for (const auto& unit : engine.units()) {
    // A change that main weights do not have would not be saved.
    engine.check_parameters(*unit);
    for (ParamGroup& group : unit->groups()) {
      const DType dtype = stored_dtype(group, values, form);
      add_members(values == WeightValues::kMain ? main_weights_of(group, dtype)
                                                : computing_weights_of(group, dtype),
                  form, number, model);
    }
  }
  for (const NamedBuffer& buffer : state.buffers) {
    const Replicas all{engine.mesh_shape().outer * engine.mesh_shape().inner, number_of_rank};
    const std::vector<int64_t> shape = buffer.value.sizes().vec();
    const FlatRange range = share_of({0, buffer.value.numel()}, shape, all, number++);
    model.add(buffer.name, {shape, {}, range, range.begin},
              std::make_shared<const FlatState>(state_of_buffer(buffer.value)));
  }
  return pieces;
}

StatePieces pieces_of(const CheckpointState& state, const StoredForm& form) {
  const StateView engine(state.sharded);
  StatePieces pieces = weight_pieces_of(state, form, WeightValues::kMain);
  PieceCollector moments(form.names, rank_in(engine.mesh()), pieces.moments, pieces.moment_pieces);
  auto number = static_cast<int64_t>(pieces.model.size());  // deals moments on where weights ended
  for (FlatState& moment : flat_moments_of(state))
    add_members(std::move(moment), form, number, moments);
  return pieces;
}

Manifest describe(const CheckpointState& state, const StatePieces& pieces, int64_t step) {
  const StateView engine(state.sharded);
  Manifest manifest{.step = step,
                    .mesh = engine.mesh_shape(),
                    .sum_group = engine.mesh().sum_group(),
                    .strategy = to_text(engine.options().strategy),
                    .precision = precision_text(engine.options().precision),
                    .schedule = {},
                    .optimizer = {},
                    .units = {},
                    .model = pieces.model,
                    .moments = pieces.moments,
                    .files = {}};
  for (const auto& unit : engine.units()) {
    UnitRecord& record = manifest.units.emplace_back();
    record.name = unit->name();
    for (const ParamGroup& group : unit->groups()) record.groups.push_back(record_of(group));
  }
  if (state.other != nullptr) {
    manifest.optimizer.name = state.other->name;
    manifest.optimizer.moments = state.other->tensors;
    manifest.optimizer.step = state.other->step;
  }
  if (state.optimizer == nullptr) return manifest;
  const StepState steps = state.optimizer->state();
  manifest.optimizer = {.name = state.optimizer->name(),
                        .moments = OptimizerAccess::of(*state.optimizer).moment_names(),
                        .step = steps.step,
                        .skipped = steps.skipped,
                        .loss_scale = steps.loss_scale,
                        .good_steps = steps.good_steps,
                        .settings = {},
                        .late_updates = OptimizerAccess::of(*state.optimizer).late_updates()};
  return manifest;
}

void Snapshot::take(StatePieces& pieces) {
  int64_t total = 0;
  for (const auto* list : {&pieces.model_pieces, &pieces.moment_pieces})
    for (const Piece& piece : *list) total += round_up(piece_bytes(piece), kAlignBytes);
  if (!memory_.defined() || total > memory_.numel()) {
    memory_ = at::Tensor();  // before allocating, because both might not fit
    memory_ = at::empty({total}, at::TensorOptions(at::kByte).pinned_memory(!device_.is_cpu()));
  }
  auto* next = total > 0 ? static_cast<std::byte*>(memory_.mutable_data_ptr()) : nullptr;
  for (auto* list : {&pieces.model_pieces, &pieces.moment_pieces})
    for (Piece& piece : *list) {
      const int64_t bytes = piece_bytes(piece);
      if (bytes == 0) continue;
      piece.read({0, piece.box.numel()}, next);
      const int64_t width = element_bytes(piece.dtype);
      piece.in_memory = [from = next, width](FlatRange range) -> const std::byte* {
        return from + range.begin * width;
      };
      piece.read = [from = next, width](FlatRange range, std::byte* into) {
        std::memcpy(into, from + range.begin * width, static_cast<size_t>(range.numel() * width));
      };
      next += round_up(bytes, kAlignBytes);
    }
}

// For each generator: the size of its state in 8 bytes, then the state.
std::string random_state(c10::Device device) {
  std::string all;
  for (at::Generator& generator : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state().cpu().contiguous();
    const auto bytes = static_cast<uint64_t>(state.nbytes());
    all.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    all.append(static_cast<const char*>(state.const_data_ptr()), bytes);
  }
  return all;
}

void set_random_state(const std::string& state, c10::Device device) {
  size_t position = 0;
  for (at::Generator& generator : generators(device)) {
    uint64_t bytes = 0;
    if (position == state.size()) return;  // written without this device: keep its state
    FSDP_CHECK(state.size() - position >= sizeof(bytes),
               "the random state of the checkpoint ends in the middle");
    std::memcpy(&bytes, state.data() + position, sizeof(bytes));
    position += sizeof(bytes);
    FSDP_CHECK(state.size() - position >= bytes,
               "the random state of the checkpoint ends in the middle");
    at::Tensor values = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
    std::memcpy(values.mutable_data_ptr(), state.data() + position, bytes);
    position += bytes;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(values);
  }
}

}  // namespace fsdp
