// Keeps libtorch's warnings out of what a person sees: they are about its kernels, and some come
// with a stack trace.
#pragma once

#include <c10/util/Exception.h>

namespace fsdp::train {

// While it lives, warnings of this thread are lines of the debug log (FSDP_LOG=debug).
class QuietTorchWarnings {
 public:
  QuietTorchWarnings() : guard_(&handler_) {}

 private:
  class Handler : public c10::WarningHandler {
   public:
    void process(const c10::Warning& warning) override;
  };

  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace fsdp::train
