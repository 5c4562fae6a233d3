// Whether a device's stream has come to a certain place, without asking the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace fsdp {

class StreamMark {
 public:
  bool is_reached() const;

 private:
  friend class StreamMarks;
  StreamMark(const uint32_t* reached, uint32_t number) : reached_(reached), number_(number) {}
  explicit StreamMark(std::shared_ptr<c10::Event> event) : event_(std::move(event)) {}

  const uint32_t* reached_ = nullptr;
  uint32_t number_ = 0;
  std::shared_ptr<c10::Event> event_;  // for drivers that cannot write numbers
};

// Note [Asking a device that is stuck]
// While a launch waits for room on a stream that stands still, other calls of CUDA wait with it,
// a query of an event among them: whoever watches for such a stream must not make any. So the
// stream itself writes numbers to the host's memory as it comes past them.
//
// Of one stream. Must outlive its marks.
class StreamMarks {
 public:
  StreamMarks();

  // At the end of what the stream was given until now.
  StreamMark next(const c10::cuda::CUDAStream& stream);

 private:
  at::Tensor reached_;  // the last number the stream came past; in page-locked memory
  uint32_t number_ = 0;
};

}  // namespace fsdp
