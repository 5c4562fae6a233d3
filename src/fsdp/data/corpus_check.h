// Verifies packed files in a thread, beside the training that reads them.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "fsdp/data/corpus.h"

namespace fsdp {

// Any number of threads may ask at a time.
class CorpusCheck {
 public:
  // Files of at most `waited_bytes` in all are verified when this returns, which throws as wait()
  // does.
  explicit CorpusCheck(std::vector<std::shared_ptr<const Corpus>> corpora,
                       int64_t waited_bytes = int64_t{64} << 20);
  // Does not wait for the files.
  ~CorpusCheck();
  CorpusCheck(const CorpusCheck&) = delete;
  CorpusCheck& operator=(const CorpusCheck&) = delete;

  // Whether damage is found already.
  bool has_failed() const { return has_failed_; }

  // Waits until everything is verified. Throws the Error of Corpus::verify().
  void wait() const { verified_.get(); }

 private:
  void verify(const std::vector<std::shared_ptr<const Corpus>>& corpora);

  std::atomic<bool> is_stopped_ = false;
  std::atomic<bool> has_failed_ = false;
  std::promise<void> outcome_;
  const std::shared_future<void> verified_ = outcome_.get_future().share();
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fsdp
