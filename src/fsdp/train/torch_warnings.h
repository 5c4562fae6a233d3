// Keeps libtorch's warnings off the console: they are about its kernels, and some come with a stack
// trace.
#pragma once

#include <c10/util/Exception.h>

#include <string_view>

#include "fsdp/base/log.h"

namespace fsdp::train {

// While it lives, warnings of this thread go to the debug log (FSDP_LOG=debug).
class QuietTorchWarnings {
 public:
  QuietTorchWarnings() : guard_(&handler_) {}

 private:
  class Handler : public c10::WarningHandler {
   public:
    void process(const c10::Warning& warning) override {
      const std::string_view text = warning.msg();
      log(LogLevel::kDebug, "libtorch: ", text.substr(0, text.find('\n')));
    }
  };

  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace fsdp::train
