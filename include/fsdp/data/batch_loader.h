// Gives a trainer its microbatches one after the other, prepared by a thread beside it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/data/batches.h"

namespace fsdp {

// Prepares two microbatches ahead. For one thread; destroying it stops and joins its own thread.
class BatchLoader {
 public:
  // Begins at `from`: first_position(), or one that was saved; UsageError where that belongs to
  // another order of windows (check_same_order).
  BatchLoader(TrainingBatches batches, const DataPosition& from);
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;
  ~BatchLoader();

  // This rank's next microbatch: those of a step in order, then the next step's. An error while it
  // was prepared is thrown here, and by every call after that.
  TokenBatch next();

  // After the last step whose microbatches have all been handed out: where a run that is resumed
  // goes on. What is prepared ahead does not count.
  DataPosition position() const;
  // How often the training windows have been gone through by then: 0.5 is half an epoch. With
  // weights, of each source.
  std::vector<double> epochs() const;

  // Whether microbatches may have more targets than others: with loss masks, or separate documents.
  bool has_unlike_targets() const;

  // Time that next() has waited for its thread, in all.
  double waited_seconds() const { return waited_seconds_; }

 private:
  void prepare();

  const TrainingBatches batches_;
  const DataPosition from_;
  int64_t num_taken_ = 0;  // microbatches
  double waited_seconds_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TokenBatch> ready_;  // the rest is guarded by mutex_
  std::exception_ptr failure_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fsdp
