#include "fsdp/data/batch_loader.h"

#include <chrono>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/start_thread.h"

namespace fsdp {
namespace {

constexpr size_t kAhead = 2;  // microbatches that are prepared before they are asked for

}  // namespace

BatchLoader::BatchLoader(TrainingBatches batches, const DataPosition& from)
    : batches_(std::move(batches)), from_(from) {
  check_same_order(from, batches_.windows(), batches_.options().seed,
                   batches_.options().source_weights);
  thread_ = start_thread("reading batches", [this, rank = thread_rank()] {
    set_thread_rank(rank);
    prepare();
  });
}

BatchLoader::~BatchLoader() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BatchLoader::prepare() {
  const BatchOptions& options = batches_.options();
  try {
    for (int64_t place = from_.windows_used;; place += options.batch) {
      for (int64_t microbatch = 0; microbatch < options.microbatches; ++microbatch) {
        TokenBatch batch = batches_.read(place, microbatch);
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopping_ || ready_.size() < kAhead; });
        if (stopping_) return;
        ready_.push_back(std::move(batch));
        changed_.notify_all();
      }
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
    changed_.notify_all();
  }
}

TokenBatch BatchLoader::next() {
  using Clock = std::chrono::steady_clock;
  std::unique_lock lock(mutex_);
  if (ready_.empty() && !failure_) {
    const Clock::time_point start = Clock::now();
    changed_.wait(lock, [&] { return !ready_.empty() || failure_ != nullptr; });
    waited_seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
  }
  // Batches prepared before the failure are good.
  if (ready_.empty()) std::rethrow_exception(failure_);
  TokenBatch batch = std::move(ready_.front());
  ready_.pop_front();
  ++num_taken_;
  lock.unlock();
  changed_.notify_all();
  return batch;
}

DataPosition BatchLoader::position() const {
  const BatchOptions& options = batches_.options();
  DataPosition position = from_;
  position.windows_used += num_taken_ / options.microbatches * options.batch;
  return position;
}

bool BatchLoader::has_unlike_targets() const {
  return batches_.windows().corpus().has_mask() ||
         batches_.options().documents != WindowDocuments::kJoined;
}

std::vector<double> BatchLoader::epochs() const { return batches_.epochs(position().windows_used); }

}  // namespace fsdp
