#include "fsdp/cli/checkpoint_path.h"

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/durable_file.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp::cli {

std::string meant_by(const std::string& path) {
  // One that is not there may have been set aside by a crash.
  const bool is_ours = !path_exists(path) || path_exists(concat(path, "/", kManifestName)) ||
                       path_exists(path + "/latest") || !steps_in(path).empty();
  return is_ours ? resolve_checkpoint(path) : path;
}

std::vector<int64_t> steps_in(const std::string& path) { return RunDirectory(path).steps(); }

}  // namespace fsdp::cli
