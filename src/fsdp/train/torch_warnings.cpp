#include "fsdp/train/torch_warnings.h"

#include <string_view>

#include "fsdp/base/log.h"

namespace fsdp::train {

void QuietTorchWarnings::Handler::process(const c10::Warning& warning) {
  const std::string_view text = warning.msg();
  log(LogLevel::kDebug, "libtorch: ", text.substr(0, text.find('\n')));
}

}  // namespace fsdp::train
