#include "support/device_trace.h"

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/comm/communicator.h"
#include "support/temp_dir.h"

namespace fsdp::testing {

namespace {

using Json = nlohmann::json;
using Spans = std::vector<std::pair<double, double>>;

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

template <size_t kCount>
bool contains_any(std::string_view text, const std::array<std::string_view, kCount>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](std::string_view part) { return contains(text, part); });
}

bool is_launch(const HostCall& call) { return contains(call.name, "Launch"); }

bool is_wait(const HostCall& call) {
  // A copy without "Async" returns when it is done.
  return contains(call.name, "Synchronize") ||
         (contains(call.name, "Memcpy") && !contains(call.name, "Async"));
}

bool is_allocation(const HostCall& call) {
  constexpr std::array<std::string_view, 8> kParts = {"Malloc",       "cudaFree", "HostAlloc",
                                                      "MemAlloc",     "MemFree",  "MemCreate",
                                                      "HostRegister", "MemMap"};
  return contains_any(call.name, kParts);
}

// In order, without overlaps.
Spans merged(Spans spans) {
  std::sort(spans.begin(), spans.end());
  Spans result;
  for (const auto& [begin, end] : spans) {
    if (result.empty() || begin > result.back().second) result.emplace_back(begin, end);
    result.back().second = std::max(result.back().second, end);
  }
  return result;
}

double length_of(const Spans& spans) {
  double sum = 0;
  for (const auto& [begin, end] : spans) sum += end - begin;
  return sum;
}

Spans common(const Spans& some, const Spans& others) {
  Spans result;
  for (size_t i = 0, j = 0; i < some.size() && j < others.size();) {
    const double begin = std::max(some[i].first, others[j].first);
    const double end = std::min(some[i].second, others[j].second);
    if (begin < end) result.emplace_back(begin, end);
    some[i].second < others[j].second ? ++i : ++j;
  }
  return result;
}

Spans spans_on(const std::vector<DeviceSpan>& spans, const std::set<int64_t>& streams) {
  Spans result;
  for (const DeviceSpan& span : spans)
    if (streams.contains(span.stream)) result.emplace_back(span.begin_us, span.end_us);
  return merged(std::move(result));
}

DeviceTrace read_trace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // Names of kernels are not always UTF-8.
  for (char& c : text)
    if (static_cast<unsigned char>(c) >= 0x80) c = '?';
  const Json trace = Json::parse(text);
  std::vector<DeviceSpan> spans;
  std::vector<HostCall> calls;
  for (const Json& event : trace.at("traceEvents")) {
    if (event.value("ph", "") != "X" || !event.contains("cat")) continue;
    const std::string kind = event.at("cat");
    const auto begin = event.at("ts").get<double>();
    if (kind == "kernel" || kind == "gpu_memcpy" || kind == "gpu_memset") {
      const Json& args = event.at("args");
      spans.push_back({.name = event.at("name"),
                       .stream = args.at("stream").get<int64_t>(),
                       .begin_us = begin,
                       .end_us = begin + event.at("dur").get<double>(),
                       .bytes = args.value("bytes", int64_t{0})});
    } else if (kind == "cuda_runtime" || kind == "cuda_driver") {
      calls.push_back(
          {.name = event.at("name"), .thread = event.at("tid").get<int64_t>(), .begin_us = begin});
    }
  }
  return {std::move(spans), std::move(calls)};
}

}  // namespace

bool is_computing(const DeviceSpan& span) {
  constexpr std::array<std::string_view, 7> kParts = {"gemm",  "nvjet", "cutlass", "xmma",
                                                      "flash", "fmha",  "splitK"};
  return contains_any(span.name, kParts);
}

bool is_device_copy(const DeviceSpan& span) { return span.is_named("Memcpy DtoD"); }

DeviceTrace::DeviceTrace(std::vector<DeviceSpan> spans, std::vector<HostCall> calls)
    : spans_(std::move(spans)), calls_(std::move(calls)) {}

std::set<int64_t> DeviceTrace::streams_of(const Filter& is_wanted) const {
  std::set<int64_t> result;
  for (const DeviceSpan& span : spans_)
    if (is_wanted(span)) result.insert(span.stream);
  return result;
}

std::set<int64_t> DeviceTrace::streams() const {
  return streams_of([](const DeviceSpan&) { return true; });
}

int64_t DeviceTrace::count(const Filter& is_wanted) const {
  return std::count_if(spans_.begin(), spans_.end(), is_wanted);
}

int64_t DeviceTrace::bytes(const Filter& is_wanted) const {
  int64_t sum = 0;
  for (const DeviceSpan& span : spans_)
    if (is_wanted(span)) sum += span.bytes;
  return sum;
}

double DeviceTrace::busy_us(const std::set<int64_t>& streams) const {
  return length_of(spans_on(spans_, streams));
}

double DeviceTrace::busy_together_us(const std::set<int64_t>& some,
                                     const std::set<int64_t>& others) const {
  return length_of(common(spans_on(spans_, some), spans_on(spans_, others)));
}

int64_t DeviceTrace::count_beside(const Filter& is_wanted, const std::set<int64_t>& streams) const {
  const Spans busy = spans_on(spans_, streams);
  return count([&](const DeviceSpan& span) {
    return is_wanted(span) && !common({{span.begin_us, span.end_us}}, busy).empty();
  });
}

std::vector<HostCall> DeviceTrace::calls_between_launches(
    const std::function<bool(const HostCall&)>& is_wanted) const {
  double first = std::numeric_limits<double>::infinity();
  double last = -first;
  for (const HostCall& call : calls_) {
    if (!is_launch(call)) continue;
    first = std::min(first, call.begin_us);
    last = std::max(last, call.begin_us);
  }
  std::vector<HostCall> result;
  for (const HostCall& call : calls_)
    if (is_wanted(call) && first < call.begin_us && call.begin_us < last) result.push_back(call);
  return result;
}

std::vector<HostCall> DeviceTrace::waits() const { return calls_between_launches(is_wait); }

std::vector<HostCall> DeviceTrace::allocations() const {
  return calls_between_launches(is_allocation);
}

std::set<int64_t> DeviceTrace::launching_threads() const {
  std::set<int64_t> threads;
  for (const HostCall& call : calls_)
    if (is_launch(call)) threads.insert(call.thread);
  return threads;
}

std::string DeviceTrace::text() const {
  struct Sum {
    int64_t count = 0;
    double us = 0;
    int64_t bytes = 0;
  };
  std::map<int64_t, std::map<std::string, Sum>> by_stream;
  for (const DeviceSpan& span : spans_) {
    Sum& sum = by_stream[span.stream][span.name.substr(0, 100)];
    ++sum.count;
    sum.us += span.end_us - span.begin_us;
    sum.bytes += span.bytes;
  }
  std::ostringstream out;
  for (const auto& [stream, names] : by_stream) {
    out << "stream " << stream << "\n";
    for (const auto& [name, sum] : names)
      out << "  " << sum.count << " x, " << sum.us << " us, " << sum.bytes << " bytes: " << name
          << "\n";
  }
  std::map<std::string, std::map<int64_t, int64_t>> by_call;
  for (const HostCall& call : calls_) ++by_call[call.name][call.thread];
  out << "calls, by thread\n";
  for (const auto& [name, threads] : by_call) {
    out << "  " << name << ":";
    for (const auto& [thread, count] : threads) out << " " << count << " x in " << thread << ",";
    out << "\n";
  }
  return out.str();
}

DeviceTrace trace_device(World& world, const std::function<void()>& body) {
  using torch::profiler::impl::ActivityType;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities = {ActivityType::CUDA};
  const auto finish = [] {
    c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).synchronizeDevice(0);
  };
  const auto meet = [&](const char* where) { world.communicator().barrier(where).wait(); };
  meet("before the trace");
  if (world.rank() == 0) {
    finish();
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
  }
  meet("the trace has begun");
  body();
  meet("the end of the trace");
  if (world.rank() != 0) return {};
  finish();
  const TempDir folder;
  const std::string path = folder / "trace.json";
  torch::autograd::profiler::disableProfiler()->save(path);
  return read_trace(path);
}

}  // namespace fsdp::testing
