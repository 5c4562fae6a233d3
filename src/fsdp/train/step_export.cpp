#include "fsdp/train/step_export.h"

#include <chrono>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/weight_export.h"
#include "fsdp/train/run_options.h"

namespace fsdp::train {

std::string export_step(const TrainOptions& options, const CheckpointState& state,
                        const NameRules& names, const PublishedModel& published, int64_t step) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string directory = concat(options.export_dir, "/", checkpoint_name(step));
  const ExportedFiles exported = export_weights(state, directory,
                                                {.model_config = published.config,
                                                 .model_files = published.files,
                                                 .existing = ExportFiles::Existing::kReplace},
                                                export_options(options, names));
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - begin);
  return concat("weights of step ", step, ": ", directory, ", ",
                bytes_text(static_cast<double>(exported.bytes)), " in ", passed.count(), " ms");
}

}  // namespace fsdp::train
