// What the model of a run was published with, to be kept in its checkpoints.
#pragma once

#include <string>
#include <vector>

#include "fsdp/checkpoint/model_files.h"
#include "fsdp/nn/architecture.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::train {

struct PublishedModel {
  std::string config;            // the text of config.json
  std::vector<ModelFile> files;  // the others
};

// From where the run begins: the checkpoint it resumes, the weights of --init, the --model.
PublishedModel published_model(const RunPlan& plan);

// A config.json of this model. Fields of `published` that nobody here reads stay as they were, and
// all of its text where it describes the same model.
std::string config_json_like(const ModelConfig& model, const std::string& published);

}  // namespace fsdp::train
