// States of operations on a device that are used again and again, each with its event.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "fsdp/comm/work.h"

namespace fsdp {

// An event costs more to make than to record, and a step has hundreds of operations. Thread-safe;
// what was taken may outlive the pool.
class WorkPool {
 public:
  // Comes back to the pool when nobody holds it any more.
  std::shared_ptr<WorkState> take();

 private:
  struct Spares {
    std::mutex mutex;  // protects the member below
    std::vector<std::unique_ptr<WorkState>> states;
  };

  const std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
};

}  // namespace fsdp
