#include "fsdp/data/corpus_check.h"

#include <exception>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/start_thread.h"

namespace fsdp {

CorpusCheck::CorpusCheck(std::vector<std::shared_ptr<const Corpus>> corpora, int64_t waited_bytes) {
  int64_t bytes = 0;
  for (const auto& corpus : corpora) bytes += corpus->packed_bytes();
  if (bytes <= waited_bytes) {
    verify(corpora);
    wait();
    return;
  }
  thread_ =
      start_thread("verifying the data", [this, corpora = std::move(corpora)] { verify(corpora); });
}

CorpusCheck::~CorpusCheck() {
  is_stopped_ = true;
  if (thread_.joinable()) thread_.join();
}

void CorpusCheck::verify(const std::vector<std::shared_ptr<const Corpus>>& corpora) {
  try {
    for (const auto& corpus : corpora)
      corpus->verify([this](int64_t) {
        if (is_stopped_) throw Error("verifying the data was stopped");
      });
    outcome_.set_value();
  } catch (...) {
    has_failed_ = true;
    outcome_.set_exception(std::current_exception());
  }
}

}  // namespace fsdp
