#include "fsdp/checkpoint/checkpoint_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/strided_box.h"
#include "fsdp/shard/engine.h"

namespace fsdp {

namespace {

// Elements [flat) of a group's whole buffer, in the type they are stored in; like those of a Piece.
struct FlatReader {
  std::function<void(FlatRange flat, std::byte* into)> read;
  std::function<const std::byte*(FlatRange flat)> in_memory = {};
};

// A replica leaves small tensors to one of them: they would become many small reads.
constexpr int64_t kMinShareNumel = int64_t{1} << 18;

// Along which axes ranks have the same values, as one number.
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

// What one of several ranks that have `held` of a tensor writes; cut between rows where that goes.
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

// Collects one set of tensors: a model's, or the moments'.
class PieceCollector {
 public:
  PieceCollector(const NameRules& names, int64_t rank, std::vector<StoredTensor>& tensors,
                 std::vector<Piece>& pieces)
      : names_(names), rank_(rank), tensors_(tensors), pieces_(pieces) {}

  // `range` of the tensor is this rank's to write; it begins at `flat_begin` of what `read` reads.
  void add(const std::string& name, const std::string& suffix, DType dtype,
           std::span<const int64_t> shape, FlatRange range, int64_t flat_begin,
           const std::shared_ptr<const FlatReader>& reader) {
    const std::vector<TensorSection> sections = names_.sections(name, shape);
    for (const TensorSection& section : sections) {
      tensors_.push_back({section.name + suffix, dtype, section.shape});
      add_without_elements(tensors_.back());
    }
    const std::vector<int64_t> strides = strides_of(shape);
    for (const Box& box : boxes(shape, range))
      for (const SectionBox& part : cut_at_sections(sections, box)) {
        // Where the part's elements lie in the model tensor.
        StridedBox place{part.model, strides, flat_begin - range.begin};
        for (size_t i = 0; i < strides.size(); ++i)
          place.begin += part.model.offsets[i] * strides[i];
        pieces_.push_back(
            piece_of(sections[part.section].name + suffix, dtype, part.stored, place, reader));
      }
  }

 private:
  // Without a box, nobody would know of a tensor without elements.
  void add_without_elements(const StoredTensor& tensor) {
    const std::vector<int64_t>& shape = tensor.shape;
    if (rank_ == 0 && std::find(shape.begin(), shape.end(), 0) != shape.end())
      pieces_.push_back({.name = tensor.name,
                         .dtype = tensor.dtype,
                         .box = {std::vector<int64_t>(shape.size(), 0), shape},
                         .read = {}});
  }

  // Reads elements of a box row by row: in one go where it is one stretch.
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

DType stored_dtype(at::ScalarType main, const StoredForm& form) {
  const DType dtype = dtype_of(main);
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
  for (const auto& unit : state.sharded.engine().units())
    for (const GroupState& group : unit->groups)
      for (int64_t i = 0; i < group.group->layout().num_tensors(); ++i)
        tensors.push_back({group.group->name_of(i), group.group->shape_of(i)});
  for (const NamedBuffer& buffer : state.buffers)
    tensors.push_back({buffer.name, buffer.value.sizes().vec()});
  check_unique(names, tensors);
}

// Calls body(member, what this rank writes of it, where that begins in the group's buffer).
template <typename Body>
void for_each_member(const ParamGroup& group, Replicas replicas, int64_t& number,
                     const Body& body) {
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const FlatRange range = share_of(group.held_of(i), group.shape_of(i), replicas, number++);
    body(i, range, group.layout().tensor_range(i).begin + range.begin);
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

GroupRecord record_of(const ParamGroup& group, Granularity granularity) {
  GroupRecord record{.dtype = group.types().weight,
                     .is_trainable = group.is_trainable(),
                     .granularity = to_text(granularity),
                     .padded_numel = group.layout().padded_numel(),
                     .members = {}};
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const std::vector<std::string>& names = group.members()[static_cast<size_t>(i)].names;
    record.members.push_back({.name = names.front(),
                              .aliases = {names.begin() + 1, names.end()},
                              .shape = group.shape_of(i),
                              .flat = group.layout().tensor_range(i)});
  }
  return record;
}

}  // namespace

StatePieces pieces_of(const CheckpointState& state, const StoredForm& form) {
  const Engine& engine = state.sharded.engine();
  const Mesh& mesh = engine.mesh();
  const MeshCoordinate rank{.outer = mesh.outer().rank(), .inner = mesh.inner().rank()};
  check_names(state, form.names);
  StatePieces pieces;
  const int64_t number_of_rank = rank_in(mesh);
  PieceCollector model(form.names, number_of_rank, pieces.model, pieces.model_pieces);
  PieceCollector moments(form.names, number_of_rank, pieces.moments, pieces.moment_pieces);
  const auto replicas_with = [&](const ParamGroup& group) {
    return replicas_of(group.setting().strategy.optimizer, engine.mesh_shape(), rank);
  };
  int64_t number = 0;
  for (const auto& unit : engine.units())
    for (const GroupState& group_state : unit->groups) {
      const ParamGroup& group = *group_state.group;
      const DType dtype = stored_dtype(group.main_weights().dtype(), form);
      const auto read = std::make_shared<const FlatReader>(main_weight_reader(group, dtype));
      for_each_member(
          group, replicas_with(group), number, [&](int64_t i, FlatRange range, int64_t flat) {
            model.add(group.name_of(i), "", dtype, group.shape_of(i), range, flat, read);
          });
    }
  for (const NamedBuffer& buffer : state.buffers) {
    const Replicas all{engine.mesh_shape().outer * engine.mesh_shape().inner, number_of_rank};
    const auto read = std::make_shared<const FlatReader>(buffer_reader(buffer.value));
    const std::vector<int64_t> shape = buffer.value.sizes().vec();
    const FlatRange range = share_of({0, buffer.value.numel()}, shape, all, number++);
    model.add(buffer.name, "", dtype_of(buffer.value.scalar_type()), shape, range, range.begin,
              read);
  }
  if (state.optimizer == nullptr) return pieces;
  for (const GroupUpdate* update : state.optimizer->group_updates()) {
    const ParamGroup& group = update->group();
    for (size_t which = 0; which < state.optimizer->moments().size(); ++which) {
      const std::string suffix = "." + state.optimizer->moments()[which].name;
      const auto read = std::make_shared<const FlatReader>(moment_reader(*update, which));
      for_each_member(group, replicas_with(group), number,
                      [&](int64_t i, FlatRange range, int64_t flat) {
                        moments.add(group.name_of(i), suffix, DType::kFloat32, group.shape_of(i),
                                    range, flat, read);
                      });
    }
  }
  return pieces;
}

Manifest describe(const CheckpointState& state, const StatePieces& pieces, int64_t step) {
  const Engine& engine = state.sharded.engine();
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
    record.name = unit->name;
    for (const GroupState& group : unit->groups)
      record.groups.push_back(record_of(*group.group, engine.options().granularity));
  }
  if (state.optimizer == nullptr) return manifest;
  const StepState steps = state.optimizer->state();
  manifest.optimizer = {.name = state.optimizer->name(),
                        .moments = {},
                        .step = steps.step,
                        .skipped = steps.skipped,
                        .loss_scale = steps.loss_scale,
                        .good_steps = steps.good_steps};
  for (const MomentKind& moment : state.optimizer->moments())
    manifest.optimizer.moments.push_back(moment.name);
  return manifest;
}

}  // namespace fsdp
