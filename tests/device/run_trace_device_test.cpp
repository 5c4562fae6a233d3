// The trace of a step on a GPU: kernels of its streams beside the operators that launched them.
#include "fsdp/train/run_trace.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>

#include "support/require.h"

namespace fsdp::train::run_trace_device_test {
namespace {

const TraceSpan* first_of(const RecordedTrace& trace, std::string_view kind,
                          std::string_view name) {
  const auto found =
      std::find_if(trace.spans.begin(), trace.spans.end(), [&](const TraceSpan& span) {
        return span.kind == kind && span.name.find(name) != std::string::npos;
      });
  return found == trace.spans.end() ? nullptr : &*found;
}

TEST(StepRecorderOnDevice, HasKernelsAfterTheirOperators) {
  FSDP_REQUIRE_GPU();
  const c10::Device device(c10::DeviceType::CUDA, 0);
  const at::Tensor matrix = at::ones({512, 512}, device);
  at::mm(matrix, matrix).sum().item<float>();  // what happens once happens before
  StepRecorder recorder(TraceDetail::kAll, device);
  recorder.begin_step();
  at::mm(matrix, matrix);
  recorder.end_step(7);
  const RecordedTrace trace = recorder.end();
  const TraceSpan* const step = first_of(trace, "step", "step 7");
  const TraceSpan* const product = first_of(trace, "compute", "aten::mm");
  const TraceSpan* const kernel = first_of(trace, "device", "");
  ASSERT_TRUE(step != nullptr && product != nullptr && kernel != nullptr);
  EXPECT_LE(step->begin_ns, product->begin_ns);
  EXPECT_GE(step->end_ns, product->end_ns);
  EXPECT_LT(kernel->begin_ns, kernel->end_ns);
  // Both clocks tell the time since 1970; a millisecond is what they may be apart.
  EXPECT_GT(kernel->begin_ns, product->begin_ns - 1'000'000);
  const auto is_row = [&](const TraceThread& thread) { return thread.thread == kernel->thread; };
  const auto row = std::find_if(trace.threads.begin(), trace.threads.end(), is_row);
  ASSERT_NE(row, trace.threads.end());
  EXPECT_TRUE(row->name.starts_with("GPU stream "));
}

}  // namespace
}  // namespace fsdp::train::run_trace_device_test
