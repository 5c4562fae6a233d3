// A trained model, ready to compute: built from what its checkpoint says of it, without gradients.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/shard/sharded.h"

namespace fsdp::train {

struct InferenceOptions {
  // A run's directory, a checkpoint, or safetensors files of other tools.
  std::string path;
  // A preset, a config.json or a directory with one; "": the checkpoint's own config.json.
  std::string model = {};
  std::string device = "auto";   // as --device
  std::string compute = "auto";  // as --compute
};

struct LoadedModel {
  std::shared_ptr<LanguageModel> model;
  Sharded sharded;
  c10::Device device;
  std::string path;      // of the checkpoint
  int64_t step = 0;      // 0 for files of other tools
  int64_t sequence = 0;  // it was trained with, in tokens; 0: not known
};

// All ranks of the mesh, which must outlive the result, call it.
LoadedModel load_for_inference(const InferenceOptions& options, const Mesh& mesh);

}  // namespace fsdp::train
