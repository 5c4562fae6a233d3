// The optimizer's state of one parameter group: memory for moments, and the spans to update.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/memory/slab_allocator.h"
#include "fsdp/optim/kernels/update_span.h"
#include "fsdp/optim/parameter_rules.h"
#include "fsdp/shard/engine/engine_memory.h"
#include "fsdp/shard/group/param_group.h"

namespace fsdp {

// Memory of an optimizer begins at multiples of this.
inline constexpr int64_t kStateAlignBytes = 128;

// A running average that an optimizer keeps of every element.
struct MomentKind {
  std::string name;  // in checkpoints: "exp_avg"
  DType dtype = DType::kFloat32;
};

// Whether updates mark the weights whose bits they change (kernels/update_span.h).
enum class ChangeMarks : uint8_t { kNone, kKept };

// The state of one MainWeightPiece, in the same memory as its main weights.
class UpdatePiece {
 public:
  // `rules` are the piece's spans of equal hyper-parameters; `group` numbers the group.
  UpdatePiece(const MainWeightPiece& main, DType gradient_dtype, uint64_t group,
              const std::vector<RuleSpan>& rules, const std::vector<MomentKind>& moments,
              ChangeMarks marks, EngineMemory& memory);

  const MainWeightPiece& main() const { return *main_; }

  // Without gradients, and without weights that are not in this memory.
  const std::vector<UpdateSpan>& spans() const { return spans_; }

  // Changes the numbers of the spans that this rule decides.
  void set_rule(int32_t rule, double weight_decay, double rate_scale);

  // Elements [flat) of the group's whole buffer, all of this piece, of moment `which`: as fp32
  // numbers on the CPU, and back (kernels/moments.h). Scaled types keep set values exactly if whole
  // blocks of scales are set at once.
  void read_moment(size_t which, FlatRange flat, float* values) const;
  void set_moment(size_t which, FlatRange flat, const float* values);
  // Their address if they are fp32 numbers in host memory; else nullptr.
  const float* moment_in_host_memory(size_t which, FlatRange flat) const;

  // Elements of the piece among [flat) whose marks are set: positions in the group's whole buffer,
  // ascending, int64, where the marks are.
  at::Tensor marked(FlatRange flat) const;
  void clear_marks() { marks_.zero_(); }

 private:
  struct Memory {
    Slab values;
    Slab scales;       // of all spans, one after the other
    at::Tensor bytes;  // the same as tensors
    at::Tensor factors;
  };
  void allocate(size_t which, DType dtype, SlabAllocator& allocator, c10::Device device);
  void allocate_marks(SlabAllocator& allocator, c10::Device device);
  class MomentOnCpu;
  // Calls body(moment, elements) for the part of each span that lies in [flat).
  template <typename Body>
  void for_each_part(size_t which, FlatRange flat, const Body& body) const;

  const MainWeightPiece* main_;
  std::vector<Memory> moments_;
  Slab mark_memory_;
  at::Tensor marks_;  // int16, [blocks, kMarkLanes]; undefined: none are kept
  std::vector<UpdateSpan> spans_;
  std::vector<int32_t> rules_;  // of the spans (HyperParameters::rule)
};

// The state of a group's optimizer shard.
class GroupUpdate {
 public:
  // The most that a span may be: everything with the same hyper-parameters, or one matrix.
  enum class Spans : uint8_t { kLong, kMatrices };

  // `hyper` are the hyper-parameters of the group's members; `number` tells groups apart.
  GroupUpdate(ParamGroup& group, uint64_t number, std::span<const HyperParameters> hyper,
              std::vector<MomentKind> moments, Spans spans, ChangeMarks marks,
              EngineMemory& memory);

  ParamGroup& group() const { return *group_; }
  const std::vector<MomentKind>& moments() const { return moments_; }
  std::vector<UpdatePiece>& pieces() { return pieces_; }
  const std::vector<UpdatePiece>& pieces() const { return pieces_; }

  // Those of UpdatePiece, for this rank's part of [flat).
  void read_moment(size_t which, FlatRange flat, float* values) const;
  void set_moment(size_t which, FlatRange flat, const float* values);
  const float* moment_in_host_memory(size_t which, FlatRange flat) const;
  float* moment_in_host_memory(size_t which, FlatRange flat) {
    return const_cast<float*>(std::as_const(*this).moment_in_host_memory(which, flat));
  }

  // The gradients of a piece, at their current place.
  at::Tensor gradient_of(const UpdatePiece& piece) const;

  // Members without a gradient (GroupGradient::is_missing) are left out of an update, and keep a
  // count of updates of their own.
  bool misses_others() const;  // than the last update did
  // After `step` updates of the optimizer, with none under way: the next one leaves out those that
  // are missing now. UsageError that names one whose moments have a scale together with its
  // neighbour's.
  void leave_out_missing(int64_t step);
  bool is_left_out(const UpdateSpan& span) const;  // all of it
  // The number of updates of a member, of the optimizer's `step`.
  int64_t updates_of(int64_t member, int64_t step) const;
  void set_updates_of(int64_t member, int64_t updates, int64_t step);
  // The parts of a piece's spans that the update changes.
  template <typename Body>
  void for_each_updated(const UpdatePiece& piece, const Body& body) const {
    for (const UpdateSpan& span : piece.spans()) {
      int64_t begin = 0;
      for (const Exception& each : exceptions_) {
        const FlatRange common = intersect(each.flat, flat_range(span));
        if (common.empty()) continue;
        if (const int64_t end = common.begin - span.flat_begin; end > begin)
          body(part_of_span(span, begin, end - begin));
        begin = common.end - span.flat_begin;
        if (each.is_left_out) continue;
        UpdateSpan late = part_of_span(span, common.begin - span.flat_begin, common.numel());
        late.num_missed = each.num_missed;
        body(late);
      }
      if (begin == 0)
        body(span);
      else if (begin < span.numel)
        body(part_of_span(span, begin, span.numel - begin));
    }
  }

 private:
  // A member that is not updated, or has not been at some time.
  struct Exception {
    int64_t member = 0;
    FlatRange flat{};
    bool is_left_out = false;
    int64_t updates = 0;     // while it is left out: how many there were
    int64_t num_missed = 0;  // else: updates that left it out
  };
  Exception& exception_of(int64_t member);
  bool is_left_out(int64_t member) const;
  void check_scales_end_with(int64_t member) const;

  ParamGroup* group_;
  std::vector<MomentKind> moments_;
  std::vector<UpdatePiece> pieces_;
  std::vector<Exception> exceptions_;  // ascending in the group's buffer
};

}  // namespace fsdp
