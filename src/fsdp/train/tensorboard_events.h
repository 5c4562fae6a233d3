// Event files that TensorBoard shows, written without it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "fsdp/train/append_file.h"
#include "fsdp/train/protobuf_message.h"
#include "fsdp/train/run_facts.h"
#include "fsdp/train/step_record.h"

namespace fsdp::train {

// One file of its own in a directory that others may share. For one thread at a time.
class TensorboardEvents {
 public:
  // Begins a file. TensorBoard then shows of the files before it only steps up to `resumed_step`,
  // the others being done again.
  TensorboardEvents(const std::string& directory, int64_t resumed_step, double time);

  // loss/train, loss_terms/NAME, learning_rate, ...; docs/watching.md lists the tags.
  void step(const StepRecord& record, double time);
  // loss/validation
  void validation(const ValidationRecord& record, double time);
  // All settings as a table, under "settings" of TensorBoard's texts.
  void settings(std::span<const SettingRow> rows, int64_t step, double time);
  // Under "sample" of the texts.
  void sample(const TextSample& sample, double time);

  const std::string& path() const { return file_.path(); }

 private:
  void write(const ProtobufMessage& event);
  void write_text(std::string_view tag, std::string_view markdown, int64_t step, double time);

  AppendFile file_;
};

}  // namespace fsdp::train
