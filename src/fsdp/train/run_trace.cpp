#include "fsdp/train/run_trace.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/train/log/chrome_trace.h"
#include "fsdp/train/report/report_page.h"

namespace fsdp::train {

RunTrace::RunTrace(std::string path, int64_t first, int64_t last, World& world, c10::Device device)
    : path_(std::move(path)), first_(first), last_(last), world_(world), device_(device) {
  if (world_.rank() != 0) return;
  check_replaceable(path_, "trace", "--trace");
  make_directories(directory_of(path_));
  write_file_durably(path_, trace_document({}));
}

void RunTrace::begin_step(int64_t step) {
  if (step == first_) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const at::Tensor base =
        at::full({1}, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(),
                 at::TensorOptions(device_).dtype(at::kLong));
    world_.communicator().broadcast(base, 0, "trace begins").wait();
    base_ns_ = base.item<int64_t>();
    // All operators of all ranks would be more than a browser shows, or rank 0 can hold.
    trace_.emplace(world_.rank() == 0 ? TraceDetail::kAll : TraceDetail::kSchedule, device_);
  }
  if (trace_) trace_->begin_step();
}

void RunTrace::end_step(int64_t step) {
  if (!trace_) return;
  trace_->end_step(step);
  if (step == last_) end();
}

void RunTrace::end() {
  if (!trace_) return;
  const RecordedTrace recorded = trace_->end();
  trace_.reset();
  write(trace_events(world_.rank(), recorded.threads, recorded.spans, base_ns_));
}

// Ranks have texts of different lengths, so the lengths travel first.
void RunTrace::write(const std::string& mine) {
  const auto num_ranks = static_cast<size_t>(world_.size());
  const auto length = static_cast<int64_t>(mine.size());
  const at::Tensor lengths =
      at::empty({world_.size()}, at::TensorOptions(device_).dtype(at::kLong));
  world_.communicator()
      .all_gather(lengths, at::full({1}, length, lengths.options()), "lengths of traces")
      .wait();
  const at::Tensor lengths_here = lengths.to(at::kCPU);
  const int64_t* const counts = lengths_here.const_data_ptr<int64_t>();
  const int64_t total = std::accumulate(counts, counts + num_ranks, int64_t{0});
  at::Tensor bytes = at::empty({length}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), mine.data(), mine.size());
  const at::Tensor all = at::empty({total}, at::TensorOptions(device_).dtype(at::kByte));
  world_.communicator()
      .all_gather(all, bytes.to(device_), "traces", std::span(counts, num_ranks))
      .wait();
  if (world_.rank() != 0) return;
  bytes = all.to(at::kCPU);
  const auto* text = static_cast<const char*>(bytes.const_data_ptr());
  std::vector<std::string> events;
  for (size_t rank = 0; rank < num_ranks; text += counts[rank], ++rank)
    events.emplace_back(text, static_cast<size_t>(counts[rank]));
  try {
    write_file_durably(path_, trace_document(events));
  } catch (const Error& error) {
    log(LogLevel::kWarning, "the trace cannot be written: ", error.what(),
        "; training goes on without it");
  }
}

}  // namespace fsdp::train
