#include "fsdp/comm/work_pool.h"

#include <utility>

namespace fsdp {

std::shared_ptr<WorkState> WorkPool::take() {
  std::unique_ptr<WorkState> state;
  {
    const std::lock_guard lock(spares_->mutex);
    if (!spares_->states.empty()) {
      state = std::move(spares_->states.back());
      spares_->states.pop_back();
    }
  }
  if (!state) state = std::make_unique<WorkState>();
  state->reopen();
  return {state.release(), [spares = spares_](WorkState* unused) {
            std::unique_ptr<WorkState> owned(unused);
            owned->close();
            const std::lock_guard lock(spares->mutex);
            spares->states.push_back(std::move(owned));
          }};
}

}  // namespace fsdp
