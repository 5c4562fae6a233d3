#include "fsdp/comm/nccl/device_watch.h"

#include <ATen/ATen.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

constexpr unsigned kCudaVersion = 12000;  // the version whose signature of the call is asked for

// The driver's cuStreamWriteValue32(); nullptr if it has none.
WriteValue find_write_value() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuStreamWriteValue32", &found, kCudaVersion, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuStreamWriteValue32", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<WriteValue>(found);
}

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenLooks{100};
constexpr std::chrono::milliseconds kBetweenLooksAtTheEnd{1};

}  // namespace

bool StreamMark::is_reached() const {
  if (event_ != nullptr) return event_->query();
  const uint32_t reached = std::atomic_ref(*const_cast<uint32_t*>(reached_)).load();
  return static_cast<int32_t>(reached - number_) >= 0;  // numbers begin again after the last one
}

StreamMarks::StreamMarks()
    : reached_(at::zeros({1}, at::device(at::kCPU).dtype(at::kInt).pinned_memory(true))) {}

StreamMark StreamMarks::next(const c10::cuda::CUDAStream& stream) {
  static const WriteValue write_value = find_write_value();
  auto* reached = reinterpret_cast<uint32_t*>(reached_.mutable_data_ptr<int32_t>());
  if (write_value != nullptr &&
      write_value(stream.stream(), reinterpret_cast<CUdeviceptr>(reached), ++number_,
                  CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS)
    return {reached, number_};
  auto event = std::make_shared<c10::Event>(at::kCUDA);
  event->record(stream);
  return StreamMark(std::move(event));
}

DeviceWatch::DeviceWatch(double timeout_seconds, Callbacks callbacks)
    : timeout_seconds_(timeout_seconds), callbacks_(std::move(callbacks)) {}

DeviceWatch::~DeviceWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::string DeviceWatch::Watched::text() const {
  if (const auto* name = std::get_if<std::string>(&what)) return *name;
  return std::get<Fingerprint>(what).text();
}

void DeviceWatch::add(const Fingerprint& operation, StreamMark end) {
  push({operation, std::move(end), Clock::now()});
}

void DeviceWatch::add(std::string what, StreamMark end) {
  push({std::move(what), std::move(end), Clock::now()});
}

void DeviceWatch::push(Watched entry) {
  const std::lock_guard lock(mutex_);
  remove_ended();  // the thread looks too seldom for a stream of small operations
  entries_.push_back(std::move(entry));
  if (!thread_.joinable())
    thread_ = std::thread([this, rank = thread_rank()] {
      set_thread_rank(rank);
      watch();
    });
}

void DeviceWatch::wait() {
  std::unique_lock lock(mutex_);
  while (true) {
    remove_ended();
    if (entries_.empty() || has_reported_) return;
    changed_.wait_for(lock, kBetweenLooksAtTheEnd);
  }
}

void DeviceWatch::remove_ended() {
  while (!entries_.empty() && entries_.front().end.is_reached()) entries_.pop_front();
}

std::string DeviceWatch::look() {
  if (const std::string words = trouble(); !words.empty()) return words + under_way();
  const std::lock_guard lock(mutex_);
  remove_ended();
  if (entries_.empty()) return "";
  const Watched& oldest = entries_.front();
  if (Clock::now() - oldest.since < std::chrono::duration<double>(timeout_seconds_)) return "";
  return concat("not ended within ", timeout_seconds_, " s: ", oldest.text(),
                "; a rank is gone or stuck, or computes longer than that");
}

std::string DeviceWatch::under_way() {
  const std::lock_guard lock(mutex_);
  remove_ended();
  return entries_.empty() ? "" : concat("; under way was ", entries_.front().text());
}

std::string DeviceWatch::trouble() const {
  try {
    return callbacks_.trouble();
  } catch (const std::exception& error) {
    return error.what();
  }
}

void DeviceWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kBetweenLooks, [this] { return stopping_; })) {
    lock.unlock();
    std::string words;
    try {
      words = look();
    } catch (const std::exception& error) {
      words = error.what();
    }
    if (!words.empty()) callbacks_.on_fail(words);
    lock.lock();
    if (words.empty()) continue;
    has_reported_ = true;
    return;
  }
}

}  // namespace fsdp
