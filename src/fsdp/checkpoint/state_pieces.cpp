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
#include "fsdp/checkpoint/amax_history.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/other_optimizer.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace {

// Reads elements [flat) of a group's whole buffer, in their stored type; as a Piece does.
struct FlatReader {
  std::function<void(FlatRange flat, std::byte* into)> read;
  std::function<const std::byte*(FlatRange flat)> in_memory = {};
};

// Smaller tensors are written by one replica alone, because parts would be many small reads.
constexpr int64_t kMinShareNumel = int64_t{1} << 18;

// Ranks that have the same values, counted over all axes as one number.
struct Replicas {
  int64_t count = 1;
  int64_t index = 0;
};

Replicas replicas_of(PlacementPair placed, MeshShape shape, MeshCoordinate rank) {
  Replicas replicas;
  if (placed.inner == Placement::kReplicate) replicas = {shape.inner, rank.inner};
  if (placed.outer == Placement::kReplicate)
    replicas = {replicas.count * shape.outer, replicas.index * shape.outer + rank.outer};
  return replicas;
}

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

// What this rank writes of a tensor: `range` of the slice that it owns, which begins at
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

  void add(const std::string& name, const std::string& suffix, DType dtype, const Written& written,
           const std::shared_ptr<const FlatReader>& reader) {
    add(names_.sections(name, whole_shape(written.owned, written.shape)), suffix, dtype, written,
        reader);
  }

  // A tensor that the rules do not divide.
  void add_as(const std::string& stored_name, DType dtype, const Written& written,
              const std::shared_ptr<const FlatReader>& reader) {
    const std::vector<int64_t> shape = whole_shape(written.owned, written.shape);
    add({{stored_name, shape, std::vector<int64_t>(shape.size(), 0)}}, "", dtype, written, reader);
  }

  const NameRules& names() const { return names_; }

 private:
  void add(const std::vector<TensorSection>& sections, const std::string& suffix, DType dtype,
           const Written& written, const std::shared_ptr<const FlatReader>& reader) {
    for (const TensorSection& section : sections) {
      tensors_.push_back({section.name + suffix, dtype, section.shape});
      add_without_elements(tensors_.back());
    }
    const std::vector<int64_t> strides = strides_of(written.shape);
    const int64_t flat_begin = written.flat_begin - written.range.begin;
    for (const OwnedBox& box : owned_boxes(written.owned, written.shape, written.range))
      for (const SectionBox& part : cut_at_sections(sections, box.whole)) {
        const StridedBox place{part.model, strides, flat_begin + place_of(part, box, strides)};
        pieces_.push_back(
            piece_of(sections[part.section].name + suffix, dtype, part.stored, place, reader));
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
  static Piece piece_of(std::string name, DType dtype, const Box& stored, const StridedBox& place,
                        const std::shared_ptr<const FlatReader>& reader) {
    const std::vector<Run> stretches = runs(place, packed(place.box, 0));
    const int64_t width = element_bytes(dtype);
    Piece piece{.name = std::move(name), .dtype = dtype, .box = stored, .read = {}};
    piece.read = [stretches, width, reader](FlatRange range, std::byte* into) {
      for (const Run& run : stretches) {
        const FlatRange common = intersect({run.to, run.to + run.numel}, range);
        if (common.empty()) continue;
        const int64_t begin = run.from + (common.begin - run.to);
        reader->read({begin, begin + common.numel()}, into + (common.begin - range.begin) * width);
      }
    };
    if (stretches.size() == 1 && reader->in_memory)
      piece.in_memory = [begin = place.begin, reader](FlatRange range) {
        return reader->in_memory({begin + range.begin, begin + range.end});
      };
    return piece;
  }

  const NameRules& names_;
  const int64_t rank_;
  std::vector<StoredTensor>& tensors_;
  std::vector<Piece>& pieces_;
};

DType stored_dtype(const ParamGroup& group, WeightValues values, const StoredForm& form) {
  const DType dtype =
      values == WeightValues::kMain ? dtype_of(group.main_weights().dtype()) : group.types().weight;
  return is_floating(dtype) ? form.model_dtype.value_or(dtype) : dtype;
}

FlatReader main_weight_reader(const ParamGroup& group, DType dtype) {
  const MainWeights& weights = group.main_weights();
  const at::ScalarType type = scalar_type_of(dtype);
  return {.read =
              [&weights, type](FlatRange flat, std::byte* into) {
                const at::NoGradGuard no_grad;
                weights.copy_to(flat, tensor_over(into, flat.numel(), type, c10::kCPU));
              },
          .in_memory =
              [&weights, type](FlatRange flat) {
                return static_cast<const std::byte*>(weights.in_host_memory(flat, type));
              }};
}

// The numbers that a forward computes with. Quantised weights have none but their main weights.
FlatReader computing_weight_reader(const ParamGroup& group, DType dtype) {
  const MainWeights& weights = group.main_weights();
  const at::ScalarType type = scalar_type_of(dtype);
  return {.read = [&weights, type](FlatRange flat, std::byte* into) {
    const at::NoGradGuard no_grad;
    const at::Tensor values = tensor_over(into, flat.numel(), type, c10::kCPU);
    for (const MainWeightPiece& piece : weights.pieces()) {
      const FlatRange common = intersect(piece.flat, flat);
      if (common.empty()) continue;
      values.narrow(0, common.begin - flat.begin, common.numel())
          .copy_(piece.weight.narrow(0, common.begin - piece.flat.begin, common.numel()));
    }
  }};
}

FlatReader weight_reader(const ParamGroup& group, WeightValues values, DType dtype) {
  return values == WeightValues::kMain ? main_weight_reader(group, dtype)
                                       : computing_weight_reader(group, dtype);
}

FlatReader moment_reader(const GroupUpdate& update, size_t which) {
  return {
      .read =
          [&update, which](FlatRange flat, std::byte* into) {
            update.read_moment(which, flat, reinterpret_cast<float*>(into));
          },
      .in_memory =
          [&update, which](FlatRange flat) {
            return reinterpret_cast<const std::byte*>(update.moment_in_host_memory(which, flat));
          }};
}

FlatReader buffer_reader(const at::Tensor& value) {
  return {.read = [value](FlatRange flat, std::byte* into) {
    const at::Tensor part = value.detach().reshape({-1}).narrow(0, flat.begin, flat.numel());
    tensor_over(into, flat.numel(), value.scalar_type(), c10::kCPU).copy_(part);
  }};
}

void check_names(const CheckpointState& state, const NameRules& names) {
  std::vector<NamedShape> tensors;
  for (const auto& unit : EngineAccess::of(state.sharded).units())
    for (const ParamGroup& group : unit->groups())
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i)
        tensors.push_back({group.name_of(i), group.whole_shape_of(i)});
  for (const NamedBuffer& buffer : state.buffers)
    tensors.push_back({buffer.name, buffer.value.sizes().vec()});
  check_unique(names, tensors);
}

// Ranks that have the same main weights and moments.
Replicas replicas_with(const ParamGroup& group) {
  const GroupSetting& setting = group.setting();
  return replicas_of(setting.strategy.optimizer, setting.shape, setting.rank);
}

// Calls body(member, what this rank writes of it).
template <typename Body>
void for_each_member(const ParamGroup& group, Replicas replicas, int64_t& number,
                     const Body& body) {
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const FlatRange range = share_of(group.held_of(i), group.shape_of(i), replicas, number++);
    body(i, Written{group.shape_of(i), group.owned_of(i), range,
                    group.layout().tensor_range(i).begin + range.begin});
  }
}

void add_moments(const CheckpointState& state, int64_t& number, PieceCollector& into) {
  Optimizer::Impl& optimizer = OptimizerAccess::of(*state.optimizer);
  for (const GroupUpdate* update : optimizer.group_updates()) {
    const ParamGroup& group = update->group();
    for (size_t which = 0; which < update->moments().size(); ++which) {
      const std::string suffix = "." + update->moments()[which].name;
      const auto read = std::make_shared<const FlatReader>(moment_reader(*update, which));
      for_each_member(group, replicas_with(group), number, [&](int64_t i, const Written& written) {
        into.add(group.name_of(i), suffix, DType::kFloat32, written, read);
      });
    }
  }
}

void add_other(const CheckpointState& state, int64_t& number, PieceCollector& into) {
  for (const auto& unit : EngineAccess::of(state.sharded).units())
    for (const ParamGroup& group : unit->groups()) {
      if (!group.is_trainable()) continue;
      for (const std::string& tensor : state.other->tensors) {
        const auto read = std::make_shared<const FlatReader>(FlatReader{
            .read = [&group, other = state.other, tensor](FlatRange flat, std::byte* to) {
              read_other(*other, group, tensor, flat,
                         tensor_over(to, flat.numel(), at::kFloat, c10::kCPU));
            }});
        for_each_member(group, replicas_with(group), number,
                        [&](int64_t i, const Written& written) {
                          into.add(group.name_of(i), "." + tensor, DType::kFloat32, written, read);
                        });
      }
    }
}

// Every rank of the group's grid has all of its history.
void add_amax_histories(const ParamGroup& group, int64_t& number, PieceCollector& into) {
  if (!group.is_quantized() || !group.quantized().has_history()) return;
  const GroupSetting& setting = group.setting();
  const Replicas all = replicas_of({.outer = Placement::kReplicate, .inner = Placement::kReplicate},
                                   setting.shape, setting.rank);
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const AmaxHistory history =
        amax_history_of(group.types().recipe, group.shape_of(i), group.owned_of(i));
    const at::Tensor amaxes = group.quantized().history_of(i);
    const FlatRange range = share_of({0, amaxes.numel()}, history.shape, all, number++);
    if (amaxes.numel() == 0) continue;
    into.add_as(amax_history_name(into.names(), group.name_of(i), group.whole_shape_of(i)),
                DType::kFloat32, {history.shape, history.owned, range, range.begin},
                std::make_shared<const FlatReader>(buffer_reader(amaxes)));
  }
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

StatePieces weight_pieces_of(const CheckpointState& state, const StoredForm& form,
                             WeightValues values) {
  const Engine& engine = EngineAccess::of(state.sharded);
  check_names(state, form.names);
  StatePieces pieces;
  const int64_t number_of_rank = rank_in(engine.mesh());
  PieceCollector model(form.names, number_of_rank, pieces.model, pieces.model_pieces);
  int64_t number = 0;
  for (const auto& unit : engine.units()) {
    // A change that main weights do not have would not be saved.
    engine.weights().check_parameters(*unit);
    for (const ParamGroup& group_state : unit->groups()) {
      const ParamGroup& group = group_state;
      const DType dtype = stored_dtype(group, values, form);
      const auto read = std::make_shared<const FlatReader>(weight_reader(group, values, dtype));
      for_each_member(group, replicas_with(group), number, [&](int64_t i, const Written& written) {
        model.add(group.name_of(i), "", dtype, written, read);
      });
    }
  }
  for (const NamedBuffer& buffer : state.buffers) {
    const Replicas all{engine.mesh_shape().outer * engine.mesh_shape().inner, number_of_rank};
    const auto read = std::make_shared<const FlatReader>(buffer_reader(buffer.value));
    const std::vector<int64_t> shape = buffer.value.sizes().vec();
    const FlatRange range = share_of({0, buffer.value.numel()}, shape, all, number++);
    model.add(buffer.name, "", dtype_of(buffer.value.scalar_type()),
              {shape, {}, range, range.begin}, read);
  }
  return pieces;
}

StatePieces pieces_of(const CheckpointState& state, const StoredForm& form) {
  const Engine& engine = EngineAccess::of(state.sharded);
  StatePieces pieces = weight_pieces_of(state, form, WeightValues::kMain);
  PieceCollector moments(form.names, rank_in(engine.mesh()), pieces.moments, pieces.moment_pieces);
  auto number = static_cast<int64_t>(pieces.model.size());  // deals moments on where weights ended
  if (state.optimizer != nullptr) add_moments(state, number, moments);
  if (state.other != nullptr) add_other(state, number, moments);
  for (const auto& unit : engine.units())
    for (const ParamGroup& group : unit->groups()) add_amax_histories(group, number, moments);
  return pieces;
}

Manifest describe(const CheckpointState& state, const StatePieces& pieces, int64_t step) {
  const Engine& engine = EngineAccess::of(state.sharded);
  Manifest manifest{.step = step,
                    .mesh = engine.mesh_shape(),
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
                        .moments = {},
                        .step = steps.step,
                        .skipped = steps.skipped,
                        .loss_scale = steps.loss_scale,
                        .good_steps = steps.good_steps,
                        .settings = {},
                        .late_updates = OptimizerAccess::of(*state.optimizer).late_updates()};
  manifest.optimizer.moments = OptimizerAccess::of(*state.optimizer).moment_names();
  return manifest;
}

void Snapshot::take(StatePieces& pieces) {
  int64_t total = 0;
  for (const auto* list : {&pieces.model_pieces, &pieces.moment_pieces})
    for (const Piece& piece : *list) total += round_up(piece_bytes(piece), kAlignBytes);
  if (total > bytes()) {
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
