#include "fsdp/optim/host_updates.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "fsdp/base/torch_dtype.h"
#include "fsdp/comm/enqueued_operation.h"

namespace fsdp {

namespace {

at::Tensor on_host(const Slab& slab, const at::Tensor& like) {
  return tensor_over(slab.at(0), like.numel(), like.scalar_type(), c10::kCPU);
}

}  // namespace

HostUpdates::HostUpdates(EngineMemory& memory, c10::Device device, const Offload& offload,
                         UpdateMath math)
    : memory_(memory),
      chunk_numel_(std::max(kScaleBlock, offload.chunk_numel / kScaleBlock * kScaleBlock)),
      math_(std::move(math)),
      team_(at::get_num_threads()),
      // Pinned, because copying pageable memory would make the host wait for the device.
      state_(at::zeros({static_cast<int64_t>(sizeof(StepState))},
                       at::dtype(at::kByte).pinned_memory(!device.is_cpu()))),
      down_(device),
      up_(device),
      host_(c10::kCPU) {
  if (!device.is_cpu()) idle_ = new_stream(device);
}

std::vector<HostUpdates::Chunk> HostUpdates::chunks_of(
    const std::vector<GroupUpdate>& groups) const {
  std::vector<Chunk> chunks;
  for (const GroupUpdate& group : groups)
    for (const UpdatePiece& piece : group.pieces()) {
      if (!piece.main().is_offloaded) continue;
      const at::Tensor gradient = group.gradient_of(piece);
      group.for_each_updated(piece, [&](const UpdateSpan& span) {
        const int64_t in_piece = span.flat_begin - piece.main().flat.begin;
        // Chunks end at the ends of blocks of scales.
        for (int64_t begin = 0; begin < span.numel;) {
          const int64_t past_block = (span.flat_begin + begin) % kScaleBlock;
          const int64_t numel = std::min(chunk_numel_ - past_block, span.numel - begin);
          chunks.push_back({part_of_span(span, begin, numel),
                            gradient.narrow(0, in_piece + begin, numel),
                            piece.main().weight.narrow(0, in_piece + begin, numel)});
          begin += numel;
        }
      });
    }
  return chunks;
}

void HostUpdates::reserve(const std::vector<GroupUpdate>& groups) {
  SlabAllocator& allocator = memory_.on_host(MemoryKind::kStaging);
  const auto grow = [&](Slab& slab, int64_t bytes) {
    if (slab.bytes() >= bytes) return;
    slab = Slab();  // releases the old one first
    slab = Slab(allocator, bytes, kStateAlignBytes);
  };
  for (const GroupUpdate& group : groups)
    for (const UpdatePiece& piece : group.pieces()) {
      if (!piece.main().is_offloaded) continue;
      for (const UpdateSpan& span : piece.spans()) {
        const int64_t numel = std::min(chunk_numel_, span.numel);
        for (Slot& slot : slots_) {
          grow(slot.gradient, numel * element_bytes(span.gradient_dtype));
          if (span.weight == nullptr) grow(slot.weight, numel * element_bytes(span.weight_dtype));
        }
      }
    }
}

void HostUpdates::begin(const at::Tensor& state, const Work& begun) {
  state_is_here_ =
      down_.run([this, state] { state_.copy_(state, /*non_blocking=*/true); }, {&begun, 1});
}

Work HostUpdates::run(const std::vector<GroupUpdate>& groups, const Work& beside) {
  std::vector<Chunk> chunks = chunks_of(groups);
  if (chunks.empty()) return beside;
  const size_t count = chunks.size();
  {
    const std::lock_guard lock(mutex_);
    std::move(chunks.begin(), chunks.end(), std::back_inserter(queue_));
  }
  auto done = std::make_shared<WorkState>();
  host_.run([this, done, count, begun = state_is_here_, beside] {
    try {
      // After the step has begun, gradients are complete and nobody reads weights. Without the
      // guard, a queue would also wait for this thread's stream: by default the one of the next
      // forward.
      std::optional<c10::StreamGuard> guard;
      if (idle_) guard.emplace(*idle_);
      wait_on_host(begun);
      for (size_t i = 0; i < count; ++i) {
        bring_down_first_chunks();
        run_first_chunk();
      }
      up_.run([] {}, std::span(&beside, 1), done);
    } catch (...) {
      done->fail(std::current_exception());
      throw;
    }
  });
  return Work(std::move(done));
}

void HostUpdates::bring_down_first_chunks() {
  while (num_coming_ < kSlots) {
    const Chunk* next = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (num_coming_ < queue_.size()) next = &queue_[num_coming_];  // stays: others only append
    }
    if (next == nullptr) return;
    Slot& slot = slots_[(first_slot_ + num_coming_) % kSlots];
    slot.down = down_.run([to = on_host(slot.gradient, next->gradient), from = next->gradient] {
      RECORD_FUNCTION("fsdp::gradients_to_host", {});
      to.copy_(from, /*non_blocking=*/true);
    });
    ++num_coming_;
  }
}

void HostUpdates::run_first_chunk() {
  Chunk chunk;
  {
    const std::lock_guard lock(mutex_);
    chunk = std::move(queue_.front());
    queue_.pop_front();
  }
  Slot& slot = slots_[first_slot_];
  wait_on_host(slot.down);
  const at::Tensor updated = update(chunk, slot);
  slot.up = up_.run([updated, weight = chunk.weight] {
    if (weight.const_data_ptr() == updated.const_data_ptr()) return;  // quantised later
    RECORD_FUNCTION("fsdp::weights_to_device", {});
    weight.copy_(updated, /*non_blocking=*/true);
  });
  first_slot_ = (first_slot_ + 1) % kSlots;
  --num_coming_;
}

at::Tensor HostUpdates::update(const Chunk& chunk, const Slot& slot) {
  RECORD_FUNCTION("fsdp::update_on_host", {});
  UpdateSpan span = chunk.span;
  span.gradient = slot.gradient.at(0);
  at::Tensor updated;
  if (span.weight != nullptr) {
    updated = tensor_over(span.weight, span.numel, chunk.weight.scalar_type(), c10::kCPU);
  } else {
    // The slot's last content may still be on its way up.
    wait_on_host(slot.up);
    span.weight = slot.weight.at(0);
    updated = on_host(slot.weight, chunk.weight);
  }
  update_span(span, math_, state_, team_);
  return updated;
}

}  // namespace fsdp
