// The files that a model was published with, which a run keeps in its checkpoints; the check that a
// checkpoint belongs to the model it is loaded into; which tokenizer belongs to a model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::train {

struct PublishedModel {
  std::string config;            // the text of config.json
  std::vector<ModelFile> files;  // the others
};

// Checkpoints, or files of other tools, that the run may begin with, in order of precedence.
std::vector<std::string> model_origins(const RunPlan& plan);

// From the origin of the run: the checkpoint it resumes, the weights of --init, or the --model.
PublishedModel published_model(const RunPlan& plan);

// A config.json of this model. Keeps fields of `published` that this project does not read, and the
// whole text of `published` if it describes the same model.
std::string config_json_like(const ModelConfig& model, const std::string& published);

// --- the same model or not -----------------------------------------------------------------------

// Throws a UsageError that names the fields that differ, and ends with `fix`. Accepts a checkpoint
// (or files of another tool) that does not describe its model.
void check_same_model(const std::string& checkpoint, const ModelConfig& model, ModelAspect aspect,
                      const std::string& fix);

// --- its tokenizer -------------------------------------------------------------------------------

// `given`, as --tokenizer says; for "auto" the tokenizer.json of the first of these directories (or
// of that of a file) that has one, and "bytes" if none has. See open_tokenizer().
std::string tokenizer_path(const std::string& given, std::span<const std::string> origins);

// "eos_token_id" of the generation_config.json and the config.json of a checkpoint, or of files of
// other tools.
std::vector<int64_t> stored_end_tokens(const std::string& checkpoint);

}  // namespace fsdp::train
